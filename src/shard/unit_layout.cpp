#include "shard/unit_layout.h"

#include <algorithm>

#include "fp8/fp8_view.h"

namespace rowshard {

namespace {
constexpr int64_t kWeightAlignment = 256;
}

int64_t WeightSpec::bytes() const {
  const int64_t codes = elements() * size_of(dtype);
  return is_mx(storage) ? mx_scale_offset() + mx_scale_shape().elements() : codes;
}

Shape WeightSpec::mx_scale_shape() const {
  return gemm_scale_shape(Grouping::kMx1x32, shape[0], shape[1]);
}

int64_t WeightSpec::mx_scale_offset() const {
  return round_up(elements(), kWeightAlignment);
}

UnitLayout::UnitLayout(std::string name, std::vector<WeightSpec> weights, int ranks)
    : name_(std::move(name)), weights_(std::move(weights)), ranks_(ranks) {
  ROWSHARD_CHECK(ranks >= 1, LogicError, "unit ", name_, " over ", ranks, " ranks");
  int64_t end = 0;
  for (const WeightSpec& weight : weights_) {
    ROWSHARD_CHECK((weight.storage != Storage::kPlain) == (weight.dtype == DType::kE4M3),
                   LogicError, "unit ", name_, ": ", weight.name, " stored as ",
                   to_string(weight.dtype));
    offsets_.push_back(end);
    end = round_up(end + weight.bytes(), kWeightAlignment);
  }
  shard_bytes_ = round_up(ceil_div(end, ranks), kWeightAlignment);
}

int64_t UnitLayout::scale_bytes() const {
  int64_t bytes = 0;
  for (const WeightSpec& weight : weights_) {
    if (weight.storage == Storage::kFp8Block) {
      bytes +=
          4 * gemm_scale_shape(Grouping::k128x128, weight.shape[0], weight.shape[1]).elements();
    }
  }
  return bytes;
}

std::vector<UnitLayout::Piece> UnitLayout::pieces(int rank) const {
  const int64_t begin = rank * shard_bytes_;
  const int64_t end = begin + shard_bytes_;
  std::vector<Piece> result;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const int64_t from = std::max(begin, offsets_[i]);
    const int64_t to = std::min(end, offsets_[i] + weights_[i].bytes());
    if (from < to) {
      result.push_back({static_cast<int>(i), from - offsets_[i], to - offsets_[i], from - begin});
    }
  }
  return result;
}

}  // namespace rowshard
