#include "finetune/token_file.h"

#include "core/error.h"
#include "unit/model/file_fixture.h"

namespace rowshard::testing {
namespace {

struct Tokens {
  std::vector<int32_t> ids{5, 6, 7, 8, 9};
  std::vector<int32_t> labels{5, 6, -100, -100, 9};
  std::vector<int64_t> offsets{0, 3, 5};
  std::map<std::string, std::string> metadata{{"format", "rowshard.tokens"}, {"version", "1"}};

  void write(const std::filesystem::path& path) const {
    const auto count = [](const auto& v) { return std::vector{static_cast<int64_t>(v.size())}; };
    write_tensors(
        path,
        {named("input_ids", "I32", count(ids), ids), named("labels", "I32", count(labels), labels),
         named("sample_offsets", "I64", count(offsets), offsets)},
        metadata);
  }
  std::string error() const {
    TemporaryDirectory directory;
    write(directory / "t.safetensors");
    const std::string text =
        config_error([&] { TokenFile::open(directory / "t.safetensors", 10); });
    EXPECT_MENTIONS(text, "t.safetensors");
    return text;
  }
};

TEST(TokenFile, SamplesComeBack) {
  TemporaryDirectory directory;
  Tokens().write(directory / "t");
  const TokenFile file = TokenFile::open(directory / "t", 10);
  EXPECT_EQ(file.samples(), 2);
  EXPECT_EQ(file.tokens(), 5);
  EXPECT_EQ(file.length(0), 3);
  EXPECT_EQ(file.trainable_tokens(), 2);  // 6 and 9: nothing predicts the first 5
  const auto ids = file.input_ids(1);
  EXPECT_EQ(std::vector<int32_t>(ids.begin(), ids.end()), (std::vector<int32_t>{8, 9}));
  const auto labels = file.labels(0);
  EXPECT_EQ(std::vector<int32_t>(labels.begin(), labels.end()), (std::vector<int32_t>{5, 6, -100}));
  EXPECT_EQ(file.metadata().at("version"), "1");
}

TEST(TokenFile, BadFilesAreNamed) {
  Tokens t;
  t.metadata.erase("format");
  EXPECT_MENTIONS(t.error(), "no token file (its format is \"pt\")");
  t = {};
  t.metadata["version"] = "2";
  EXPECT_MENTIONS(t.error(), "version 2");
  t = {};
  t.labels.pop_back();
  EXPECT_MENTIONS(t.error(), "5 input_ids and 4 labels");
  t = {};
  t.offsets = {0};
  EXPECT_MENTIONS(t.error(), "no samples");
  t = {};
  t.offsets = {};
  EXPECT_MENTIONS(t.error(), "no samples");
  t = {};
  t.offsets = {1, 3, 5};
  EXPECT_MENTIONS(t.error(), "from 1 to 5");
  t = {};
  t.offsets = {0, 3, 6};
  EXPECT_MENTIONS(t.error(), "from 0 to 6");
  t = {};
  t.offsets = {0, 3, 3, 5};
  EXPECT_MENTIONS(t.error(), "sample 1 goes from token 3 to 3");
  t = {};
  t.offsets = {0, 9, 5};
  EXPECT_MENTIONS(t.error(), "sample 0 goes from token 0 to 9");
  t = {};
  t.offsets = {0, -1, 5};
  EXPECT_MENTIONS(t.error(), "sample 0 goes from token 0 to -1");
  t = {};
  t.ids[3] = 10;
  EXPECT_MENTIONS(t.error(), "sample 1 has token 10 at position 0, and the model has 10");
  t = {};
  t.ids[0] = -1;
  EXPECT_MENTIONS(t.error(), "sample 0 has token -1");
  t = {};
  t.labels[1] = 7;  // shifted in the file
  EXPECT_MENTIONS(t.error(), "sample 0 has label 7 at position 1, where the token is 6");
  t = {};
  t.labels = {5, -100, -100, 8, -100};  // only first positions
  EXPECT_MENTIONS(t.error(), "none of its 5 tokens is trained");
}

TEST(TokenFile, WrongTensors) {
  TemporaryDirectory directory;
  const std::map<std::string, std::string> metadata = Tokens().metadata;
  const auto open = [&] { return config_error([&] { TokenFile::open(directory / "t", 10); }); };
  const auto ids = named<int32_t>("input_ids", "I32", {2}, {1, 2});
  const auto labels = named<int32_t>("labels", "I32", {2}, {1, 2});
  write_tensors(directory / "t", {ids, labels}, metadata);
  EXPECT_MENTIONS(open(), "no tensor sample_offsets");
  write_tensors(directory / "t",
                {ids, labels, named<int32_t>("sample_offsets", "I32", {2}, {0, 2})}, metadata);
  EXPECT_MENTIONS(open(), "sample_offsets is I32 [2], and I64 is needed");
  write_tensors(directory / "t",
                {named<int32_t>("input_ids", "I32", {1, 2}, {1, 2}), labels,
                 named<int64_t>("sample_offsets", "I64", {2}, {0, 2})},
                metadata);
  EXPECT_MENTIONS(open(), "input_ids is I32 [1, 2], and one dimension");
  write_bytes(directory / "t", "{\"messages\": []}");
  EXPECT_MENTIONS(open(), "no safetensors file");
}

}  // namespace
}  // namespace rowshard::testing
