#include "model/decoder_slice.h"

#include <cstring>

#include "model/decoder_units.h"
#include "model/quantize_checkpoint.h"
#include "model/weight_source.h"
#include "unit/model/file_fixture.h"

namespace rowshard {
namespace {

using testing::config_error;

nlohmann::json sized(int hidden, int ffn, int heads, int kv_heads, int head_dim,
                     const char* family = "llama") {
  nlohmann::json config = testing::tiny_config(family);
  config["hidden_size"] = hidden;
  config["intermediate_size"] = ffn;
  config["num_attention_heads"] = heads;
  config["num_key_value_heads"] = kv_heads;
  config["head_dim"] = head_dim;
  config["vocab_size"] = 131;
  return config;
}
ModelConfig model(int hidden, int ffn, int heads, int kv_heads, int head_dim) {
  return ModelConfig::parse(sized(hidden, ffn, heads, kv_heads, head_dim), "test");
}

TEST(DecoderSlice, NearEqualPartsCoverEverythingOnce) {
  for (const int64_t count : {1, 7, 128, 640, 9728}) {
    for (const int64_t step : {1, 16, 128}) {
      for (const int parts : {1, 2, 3, 8}) {
        int64_t end = 0;
        for (int part = 0; part < parts; ++part) {
          const Range range = near_equal_part(count, step, parts, part);
          EXPECT_EQ(range.begin, end);
          EXPECT_TRUE(range.begin % step == 0 || range.begin == count);
          end = range.end;
        }
        EXPECT_EQ(end, count);
      }
    }
  }
}

// Qwen3-4B: 76 FFN blocks over 8 ranks.
TEST(DecoderSlice, TheFfnIsCutAtBlocksAsEvenlyAsTheyAllow) {
  const ModelConfig config = model(2560, 9728, 32, 8, 128);
  std::vector<int64_t> blocks;
  for (int rank = 0; rank < 8; ++rank)
    blocks.push_back(DecoderSlice::make(config, Storage::kFp8Block, 8, rank).ffn.size() / 128);
  EXPECT_EQ(blocks, (std::vector<int64_t>{10, 10, 10, 10, 9, 9, 9, 9}));
  // bf16 needs no blocks: every rank the same.
  EXPECT_EQ(DecoderSlice::make(config, Storage::kPlain, 8, 7).ffn.size(), 9728 / 8);
}

TEST(DecoderSlice, KvHeadsAreHeldByNeighboursWhenThereAreFewer) {
  const ModelConfig config = model(256, 640, 8, 2, 128);
  for (int rank = 0; rank < 4; ++rank) {
    const DecoderSlice slice = DecoderSlice::make(config, Storage::kFp8Block, 4, rank);
    EXPECT_EQ(slice.heads, (Range{2 * rank, 2 * rank + 2}));
    EXPECT_EQ(slice.kv_heads, (Range{rank / 2, rank / 2 + 1}));
    EXPECT_EQ(slice.kv_replicas, 2);
    EXPECT_EQ(slice.of(config, 0), DecoderSlice::make(config, Storage::kFp8Block, 4, 0));
  }
  EXPECT_EQ(DecoderSlice::make(config, Storage::kFp8Block, 2, 1).kv_replicas, 1);
}

TEST(DecoderSlice, RefusalsNameTheReasonAndTheSizesThatWork) {
  const auto refusal = [](const ModelConfig& config, Storage linear, int ranks) {
    return config_error([&] { DecoderSlice::make(config, linear, ranks, 0); });
  };
  // Qwen2.5-0.5B: 14 heads of 64.
  const std::string small = refusal(model(896, 4864, 14, 2, 64), Storage::kFp8Block, 2);
  EXPECT_MENTIONS(small, "448 query rows are no multiple");
  EXPECT_MENTIONS(small, "sizes that work in FP8: 1");
  EXPECT_EQ(DecoderSlice::make(model(896, 4864, 14, 2, 64), Storage::kPlain, 2, 1).heads.begin, 7);
  // Qwen2.5-7B at 8: 28 heads.
  const std::string seven = refusal(model(3584, 18944, 28, 4, 128), Storage::kFp8Block, 8);
  EXPECT_MENTIONS(seven, "28 attention heads do not divide by 8");
  EXPECT_MENTIONS(seven, "1, 2, 4, 28");
  EXPECT_MENTIONS(refusal(model(256, 640, 12, 4, 128), Storage::kPlain, 6), "4 KV heads neither");
  EXPECT_MENTIONS(refusal(model(256, 200, 4, 4, 128), Storage::kFp8Block, 4), "2 FP8 blocks");
}

class SlicedWeights : public ::testing::Test {
 protected:
  /// Every weight of every rank's units is the same part of one rank's unit, codes, scales and
  /// plain elements, read in ranges that begin and end anywhere.
  void compare(const std::filesystem::path& directory, Storage linear, int ranks,
               DType activations) {
    const Checkpoint checkpoint = Checkpoint::open(directory);
    const ModelConfig& config = checkpoint.config();
    const DecoderUnits whole(config, DecoderSlice::whole(config), linear, activations, 1);
    int compared = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const DecoderUnits units(config, DecoderSlice::make(config, linear, ranks, rank), linear,
                               activations, 1);
      for (int unit = 0; unit < units.count(); ++unit) {
        for (size_t w = 0; w < units.layouts()[unit].weights().size(); ++w) {
          const WeightSpec& part = units.layouts()[unit].weights()[w];
          const WeightSpec& all = whole.layouts()[unit].weights()[w];
          ASSERT_EQ(part.name, all.name);
          EXPECT_TRUE(all.slice.is_whole());
          compare(checkpoint, part, all);
          ++compared;
        }
      }
    }
    EXPECT_GT(compared, 9 * ranks);
  }

  static void compare(const Checkpoint& checkpoint, const WeightSpec& part, const WeightSpec& all) {
    SCOPED_TRACE(part.name);
    CheckpointSource part_source(checkpoint), all_source(checkpoint);
    std::vector<std::byte> got(part.bytes()), want(all.bytes());
    const int64_t third = part.bytes() / 3 + 1;  // inside rows and elements
    for (int64_t begin = 0; begin < part.bytes(); begin += third) {
      const int64_t end = std::min(begin + third, part.bytes());
      part_source.read(part, begin, end, got.data() + begin);
    }
    all_source.read(all, 0, all.bytes(), want.data());
    const int64_t cols = part.shape.rank() == 2 ? part.shape[1] : 1;
    const int64_t all_cols = all.shape.rank() == 2 ? all.shape[1] : 1;
    const int64_t element = size_of(part.dtype);
    for (int64_t row = 0; row < part.shape[0]; ++row) {
      ASSERT_EQ(0,
                std::memcmp(&got[row * cols * element],
                            &want[((part.slice.row + row) * all_cols + part.slice.col) * element],
                            cols * element))
          << "row " << row;
    }
    if (part.storage != Storage::kFp8Block)
      return;
    const int64_t block_rows = ceil_div(part.shape[0], 128), block_cols = ceil_div(cols, 128);
    const int64_t stride = ceil_div(all_cols, 128);
    std::vector<float> scales(block_rows * block_cols),
        all_scales(ceil_div(all.shape[0], 128) * stride);
    part_source.scales(part, scales.data());
    all_source.scales(all, all_scales.data());
    for (int64_t i = 0; i < block_rows * block_cols; ++i) {
      const int64_t row = part.slice.row / 128 + i / block_cols;
      ASSERT_EQ(scales[i], all_scales[row * stride + part.slice.col / 128 + i % block_cols]);
    }
  }

  testing::TemporaryDirectory directory_;
};

TEST_F(SlicedWeights, QuantisedOnTheFlyAreThoseOfTheWhole) {
  const nlohmann::json config = sized(192, 600, 4, 2, 128, "qwen2");  // biases, partial blocks
  testing::write_tiny_model(directory_ / "m", config, testing::tiny_tensors(config));
  compare(directory_ / "m", Storage::kFp8Block, 2, DType::kF32);
  compare(directory_ / "m", Storage::kFp8Block, 4, DType::kBF16);
}

TEST_F(SlicedWeights, PlainOnesToo) {
  const nlohmann::json config = sized(96, 100, 6, 3, 16);
  testing::write_tiny_model(directory_ / "m", config, testing::tiny_tensors(config));
  compare(directory_ / "m", Storage::kPlain, 3, DType::kF32);
  compare(directory_ / "m", Storage::kPlain, 6, DType::kBF16);
}

TEST_F(SlicedWeights, StoredCodesAndScalesAreTheFiles) {
  const nlohmann::json config = sized(192, 600, 4, 2, 128);
  testing::write_tiny_model(directory_ / "m", config, testing::tiny_tensors(config));
  quantize_checkpoint(directory_ / "m", directory_ / "fp8", {});
  compare(directory_ / "fp8", Storage::kFp8Block, 2, DType::kF32);
  compare(directory_ / "fp8", Storage::kFp8Block, 4, DType::kF32);
}

}  // namespace
}  // namespace rowshard
