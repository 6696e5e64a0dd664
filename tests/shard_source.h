// A UnitSource in which every byte is known, and a unit with every kind of weight.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <vector>

#include "shard/sharded_unit.h"
#include "shard/usage_plan.h"

namespace rowshard::testing {

/// Byte `i` of a weight: neither constant nor periodic in any block or shard size.
inline uint8_t weight_byte(const std::string& name, int64_t i, int version = 0) {
  const uint64_t x =
      (i + 1) * 0x9E3779B97F4A7C15ull + std::hash<std::string>{}(name) + 131 * version;
  return static_cast<uint8_t>((x ^ (x >> 29)) >> 17);
}

/// Compact scale `i`: a power of two of its own for each block nearby.
inline float block_scale(int64_t i, int version = 0) {
  return std::ldexp(1.0f + 0.125f * static_cast<float>(version), static_cast<int>(i % 13) - 6);
}

/// Gives the bytes above, and the scales of the 128-row bands it was asked to read: what a source
/// that quantises on the fly knows. Counts the bytes it was asked for.
class KnownSource : public UnitSource {
 public:
  explicit KnownSource(int version = 0) : version_(version) {}

  void read(const WeightSpec& weight, int64_t begin, int64_t end, std::byte* to) override {
    for (int64_t i = begin; i < end; ++i)
      to[i - begin] = std::byte{weight_byte(weight.name, i, version_)};
    bytes_read += end - begin;
    if (weight.storage == Storage::kFp8Block) {
      const int64_t band = 128 * weight.shape[1];
      known_.push_back({weight.name, begin / band, ceil_div(end, band)});
    }
  }
  void scales(const WeightSpec& weight, float* to) override {
    const int64_t columns = ceil_div(weight.shape[1], 128);
    std::fill_n(to, ceil_div(weight.shape[0], 128) * columns, 0.0f);
    for (const Bands& bands : known_) {
      for (int64_t i = bands.begin * columns; bands.name == weight.name && i < bands.end * columns;
           ++i) {
        to[i] = block_scale(i, version_);
      }
    }
  }
  int64_t bytes_read = 0;

 private:
  struct Bands {
    std::string name;
    int64_t begin, end;
  };
  int version_;
  std::vector<Bands> known_;
};

inline WeightSpec fp8_weight(std::string name, int64_t n, int64_t k) {
  return {std::move(name), {n, k}, Storage::kFp8Block, DType::kE4M3};
}
inline WeightSpec plain_weight(std::string name, Shape shape, DType dtype = DType::kBF16) {
  return {std::move(name), shape, Storage::kPlain, dtype};
}

/// Partial blocks, odd element counts, several storages.
inline UnitLayout mixed_layout(int ranks, const std::string& name = "mixed") {
  return UnitLayout(name,
                    {plain_weight(name + ".norm", {75}), fp8_weight(name + ".q", 192, 320),
                     plain_weight(name + ".bias", {7}, DType::kF32),
                     fp8_weight(name + ".down", 200, 96), fp8_weight(name + ".k", 3, 129)},
                    ranks);
}

/// The whole gathered buffer a source makes, padding included.
inline std::vector<uint8_t> gathered_bytes(const UnitLayout& layout, int version = 0) {
  std::vector<uint8_t> bytes(layout.gathered_bytes(), 0);
  for (size_t w = 0; w < layout.weights().size(); ++w) {
    const WeightSpec& weight = layout.weights()[w];
    for (int64_t i = 0; i < weight.bytes(); ++i)
      bytes[layout.offset(w) + i] = weight_byte(weight.name, i, version);
  }
  return bytes;
}

/// Scales of a weight in the GEMM layout, padding included.
inline std::vector<float> gemm_scales(const WeightSpec& weight, int version = 0) {
  const Shape shape = gemm_scale_shape(Grouping::k128x128, weight.shape[0], weight.shape[1]);
  const int64_t columns = ceil_div(weight.shape[1], 128);
  std::vector<float> scales(shape.elements(), 1.0f);
  for (int64_t row = 0; row < shape[0]; ++row) {
    for (int64_t col = 0; col < columns; ++col)
      scales[row * shape[1] + col] = block_scale(row * columns + col, version);
  }
  return scales;
}

/// The weights of a gathered unit (none MX) where they lie in its flat buffer, padding zero.
/// `bench` downloads.
template <typename Bench>
std::vector<uint8_t> unit_bytes(ShardedUnit& unit, Bench& bench) {
  const UnitLayout& layout = unit.layout();
  std::vector<uint8_t> bytes(layout.gathered_bytes(), 0);
  for (size_t w = 0; w < layout.weights().size(); ++w) {
    const int weight = static_cast<int>(w);
    const bool fp8 = layout.weights()[w].storage == Storage::kFp8Block;
    const auto own = bench.template download<uint8_t>(fp8 ? unit.fp8(weight).rowwise().codes
                                                          : unit.plain(weight));
    std::copy(own.begin(), own.end(), bytes.begin() + layout.offset(weight));
  }
  return bytes;
}

/// The units that executing a plan gathers, in order, when those in `there` are there; `there`
/// becomes what it leaves.
inline std::vector<int> gathers_of(const UsagePlan& plan, std::set<int>& there) {
  std::vector<int> gathered;
  const auto want = [&](int unit) {
    if (there.insert(unit).second)
      gathered.push_back(unit);
  };
  for (const PlanStep& step : plan.steps) {
    if (step.gather)
      want(step.use.unit);
    for (const int unit : step.prefetch)
      want(unit);
    if (step.release)
      there.erase(step.use.unit);
  }
  for (const int unit : plan.closing)
    want(unit);
  return gathered;
}

}  // namespace rowshard::testing
