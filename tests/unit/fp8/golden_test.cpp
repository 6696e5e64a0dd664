// Replays tests/data/fp8_golden.safetensors, which tests/python/fp8_oracle.py makes in NumPy from
// the rule alone: every byte of both copies, padding included.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "fp8_test_data.h"

namespace rowshard {
namespace {

using nlohmann::json;
using testing::Bench;
using testing::difference;
using testing::Fp8Tensor;

struct Golden {
  json header;
  std::string bytes;  // after the header

  Golden() {
    std::ifstream file(ROWSHARD_SOURCE_DIR "/tests/data/fp8_golden.safetensors", std::ios::binary);
    const std::string all((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    uint64_t length = 0;
    if (all.size() < sizeof length) {
      throw std::runtime_error("tests/data/fp8_golden.safetensors cannot be read");
    }
    std::memcpy(&length, all.data(), sizeof length);
    header = json::parse(all.substr(sizeof length, length));
    bytes = all.substr(sizeof length + length);
  }
  std::vector<uint8_t> tensor(const std::string& name) const {
    const auto& span = header.at(name).at("data_offsets");
    return {bytes.begin() + span[0].get<int64_t>(), bytes.begin() + span[1].get<int64_t>()};
  }
  Shape shape(const std::string& name) const {
    const auto& dims = header.at(name).at("shape");
    return {dims[0].get<int64_t>(), dims[1].get<int64_t>()};
  }
};

Grouping grouping_of(const std::string& name) {
  for (const Grouping grouping : testing::kGroupings) {
    if (name == to_string(grouping)) {
      return grouping;
    }
  }
  throw std::runtime_error("no grouping " + name);
}

TEST(Golden, BytesOfTheNumPyOracle) {
  const Golden golden;
  const json cases = json::parse(golden.header.at("__metadata__").at("cases").get<std::string>());
  ASSERT_GE(cases.size(), 10u);
  for (size_t i = 0; i < cases.size(); ++i) {
    const json& c = cases[i];
    Bench bench;
    const std::string x_name = c.at("x");
    const Shape shape = golden.shape(x_name);
    const std::string dtype_name = c.at("dtype");
    const DType dtype = dtype_name == "f32"    ? DType::kF32
                        : dtype_name == "bf16" ? DType::kBF16
                                               : DType::kF16;
    const std::vector<uint8_t> bits = golden.tensor(x_name);
    Tensor x = bench.arena.tensor(Category::kActivations, "x", dtype, shape);
    copy(x, ConstView(bits.data(), dtype, shape, kHost), bench.stream);

    const Grouping grouping = grouping_of(c.at("grouping"));
    QuantizeOptions options;
    options.format = c.at("format") == "e4m3" ? Fp8Format::kE4M3 : Fp8Format::kE5M2;
    options.power_of_two = c.at("power_of_two");
    Fp8Tensor row(bench, grouping, shape[0], shape[1], options.format);
    Fp8Tensor col(bench, grouping, shape[1], shape[0], options.format);
    const Fp8View row_view = row.view(), col_view = col.view();
    quantize(&row_view, &col_view, x, options, bench.stream);
    for (const auto& [name, view] :
         {std::pair("rowwise", row_view), std::pair("columnwise", col_view)}) {
      const std::string prefix = std::to_string(i) + "." + name;
      const auto got = testing::download(bench, view);
      EXPECT_EQ(difference(got.codes, golden.tensor(prefix + ".codes")), "equal")
          << prefix << ": " << c;
      EXPECT_EQ(difference(got.scales, golden.tensor(prefix + ".scales")), "equal")
          << prefix << ": " << c;
    }
  }
}

}  // namespace
}  // namespace rowshard
