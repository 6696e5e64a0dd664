#include "model/safetensors.h"

#include <unistd.h>

#include "core/error.h"
#include "file_fixture.h"

namespace rowshard::testing {
namespace {

TEST(Safetensors, EveryDtypeAndRankComesBack) {
  TemporaryDirectory directory;
  const std::vector<NamedTensor> tensors{
      named<uint8_t>("codes", "F8_E4M3", {3}, {1, 2, 3}),
      named<float>("scalar", "F32", {}, {1.5f}),
      named<double>("d", "F64", {2, 1}, {0.25, -3}),
      named<uint16_t>("h", "F16", {3}, {0x3c00, 0x4000, 0xbc00}),
      named<uint16_t>("b", "BF16", {1, 1, 3}, {0x3f80, 0x4000, 0xbf80}),
      named<uint8_t>("e5", "F8_E5M2", {1}, {9}),
      named<uint8_t>("e8", "F8_E8M0", {1}, {127}),
      named<uint8_t>("u", "U8", {5}, {5, 4, 3, 2, 1}),
      named<int32_t>("i", "I32", {1}, {-7}),
      named<int64_t>("l", "I64", {1}, {int64_t{1} << 40}),
      named<uint8_t>("flag", "BOOL", {1}, {1}),
      named<float>("empty", "F32", {0, 4}, {}),
      named<float>("five", "F32", {1, 1, 1, 1, 2}, {6, 7}),
  };
  write_tensors(directory / "a.safetensors", tensors, {{"k", "v"}});
  const SafetensorsFile file = SafetensorsFile::open(directory / "a.safetensors");
  EXPECT_EQ(file.tensors().size(), tensors.size());
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"k", "v"}}));
  for (const NamedTensor& tensor : tensors) {
    const TensorInfo& info = file.at(tensor.spec.name);
    EXPECT_EQ(info.tag, tensor.spec.tag);
    EXPECT_EQ(info.dims, tensor.spec.dims);
    std::string bytes(info.bytes, '?');
    file.read(info.name, 0, info.bytes, bytes.data());
    EXPECT_EQ(bytes, tensor.bytes) << info.name;
  }
  EXPECT_EQ(file.at("b").shape(), (Shape{1, 1, 3}));
  EXPECT_EQ(file.at("b").dtype(), DType::kBF16);
  EXPECT_EQ(file.read_all<double>("d"), (std::vector<double>{0.25, -3}));
  EXPECT_MENTIONS(config_error([&] { file.at("flag").dtype(); }), "BOOL");
  EXPECT_MENTIONS(config_error([&] { file.at("five").shape(); }), "more than 4 dimensions");
  EXPECT_MENTIONS(config_error([&] { file.read_all<float>("d"); }), "F64 [2, 1]");
  EXPECT_MENTIONS(config_error([&] { file.at("nothing"); }), "no tensor nothing");
}

TEST(Safetensors, EveryElementIsAligned) {
  TemporaryDirectory directory;
  write_tensors(directory / "a",
                {named<uint8_t>("a", "U8", {3}, {1, 2, 3}), named<uint16_t>("b", "BF16", {1}, {1}),
                 named<int64_t>("c", "I64", {1}, {1}), named<float>("d", "F32", {1}, {1})});
  const SafetensorsFile file = SafetensorsFile::open(directory / "a");
  EXPECT_EQ(file.at("c").offset % 8, 0);
  EXPECT_EQ(file.at("d").offset, file.at("c").offset + 8);
  EXPECT_EQ(file.at("b").offset, file.at("d").offset + 4);
  EXPECT_EQ(file.at("a").offset, file.at("b").offset + 2);
}

TEST(Safetensors, ReadsOnlyTheRangeAskedFor) {
  TemporaryDirectory directory;
  std::vector<int32_t> values(100);
  for (int i = 0; i < 100; ++i)
    values[i] = i;
  write_tensors(directory / "a",
                {named<float>("before", "F32", {2}, {8, 9}), named("x", "I32", {10, 10}, values)});
  const SafetensorsFile file = SafetensorsFile::open(directory / "a");
  std::vector<int32_t> part(5, -1);
  file.read("x", 37 * 4, 3 * 4, part.data());
  EXPECT_EQ(part, (std::vector<int32_t>{37, 38, 39, -1, -1}));
  file.read("x", 400, 0, part.data());
  for (auto [begin, count] :
       {std::pair<int64_t, int64_t>{397, 4}, {-1, 1}, {401, 0}, {0, -1}, {1, INT64_MAX}}) {
    EXPECT_THROW(file.read("x", begin, count, part.data()), LogicError) << begin << " " << count;
  }
}

TEST(Safetensors, OffsetsBeyond4GiB) {
  TemporaryDirectory directory;
  const int64_t big = (int64_t{5} << 30) + 3;
  const std::string header =
      message(R"({"big":{"dtype":"U8","shape":[)", big, R"(],"data_offsets":[0,)", big,
              R"(]},"tail":{"dtype":"U8","shape":[2],"data_offsets":[)", big, ",", big + 2, "]}}");
  const std::string bytes = raw_safetensors(header, 0);
  write_bytes(directory / "big", bytes);
  // A sparse file: no blocks behind the hole.
  ASSERT_EQ(::truncate((directory / "big").c_str(), static_cast<off_t>(bytes.size()) + big), 0);
  std::ofstream(directory / "big", std::ios::binary | std::ios::app) << "yz";
  const SafetensorsFile file = SafetensorsFile::open(directory / "big");
  char tail[2];
  file.read("tail", 0, 2, tail);
  EXPECT_EQ(std::string(tail, 2), "yz");
  char last[1] = {'?'};
  file.read("big", big - 1, 1, last);
  EXPECT_EQ(last[0], '\0');
}

// What the reference implementation (safetensors 0.8.0, Python) writes for {"w": f32 [[1, 2]], "s":
// bf16 [3]} with metadata {"format": "pt"}.
TEST(Safetensors, ReadsTheReferenceWritersBytes) {
  TemporaryDirectory directory;
  std::string header =
      R"({"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},)"
      R"("s":{"dtype":"BF16","shape":[1],"data_offsets":[8,10]}})";
  header.append((8 - header.size() % 8) % 8, ' ');
  const std::string data("\0\0\x80\x3f\0\0\0\x40\x40\x40", 10);
  write_bytes(directory / "reference", raw_safetensors(header, 0) + data);
  write_tensors(directory / "ours", {named<uint16_t>("s", "BF16", {1}, {0x4040}),
                                     named<float>("w", "F32", {1, 2}, {1, 2})});
  const auto slurp = [&](const char* name) { return read_text_file(directory / name); };
  EXPECT_EQ(slurp("ours"), slurp("reference"));
  EXPECT_EQ(SafetensorsFile::open(directory / "reference").read_all<float>("w"),
            (std::vector<float>{1, 2}));
}

TEST(Safetensors, BrokenFilesAreNamed) {
  TemporaryDirectory directory;
  const std::string x8 = R"("x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const auto tensor = [](const std::string& fields) { return R"({"x":{)" + fields + "}}"; };
  struct Case {
    std::string bytes, expected;
  };
  const std::vector<Case> cases{
      {"", "too short"},
      {"1234567", "too short"},
      {"version https://git-lfs.github.com/spec/v1", "Git LFS"},
      {raw_safetensors("{" + x8 + "}", 8).substr(0, 30), "truncated"},
      {raw_safetensors("{" + x8 + "}", 7), "truncated"},
      {raw_safetensors("{" + x8 + "}", 9), "1 bytes after the last tensor"},
      {raw_safetensors("{" + x8, 8), "no valid JSON"},
      {raw_safetensors("\xff\xfe", 8), "no valid JSON"},
      {raw_safetensors("[]", 0), "no JSON object"},
      {raw_safetensors(R"({"x":3})", 0), "tensor x has no dtype"},
      {raw_safetensors(tensor(R"("dtype":"F32","shape":[2])"), 8), "tensor x has no dtype"},
      {raw_safetensors(tensor(R"("dtype":"F33","shape":[2],"data_offsets":[0,8])"), 8), "F33"},
      {raw_safetensors(tensor(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), 8),
       "a dimension -2"},
      {raw_safetensors(tensor(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), 8),
       "a dimension 2.0"},
      {raw_safetensors(tensor(R"("dtype":"F32","shape":["2"],"data_offsets":[0,8])"), 8),
       "a dimension \"2\""},
      {raw_safetensors(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), 8),
       "data_offsets [8,0]"},
      {raw_safetensors(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,9])"), 8),
       "two data_offsets"},
      {raw_safetensors(tensor(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), 8),
       "F32 [3] has 8 bytes in the file instead of 12"},
      // 2^62 x 4 elements wrap to 0 bytes in 64 bits.
      {raw_safetensors(
           tensor(R"("dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0])"), 0),
       "instead of a number that fits"},
      {raw_safetensors("{" + x8 + R"(,"y":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", 8),
       "tensor y begins at byte 4, inside tensor x"},
      {raw_safetensors("{" + x8 + R"(,"y":{"dtype":"U8","shape":[1],"data_offsets":[9,10]}})", 10),
       "bytes 8 to 9 before tensor y belong to no tensor"},
      {raw_safetensors(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,2])"), 2),
       "bytes 0 to 1"},
      {raw_safetensors(R"({"__metadata__":{"a":1}})", 0), "__metadata__ a is no string"},
      {raw_safetensors(R"({"__metadata__":[]})", 0), "__metadata__ is no JSON object"},
  };
  for (const Case& test : cases) {
    write_bytes(directory / "bad.safetensors", test.bytes);
    const std::string error =
        config_error([&] { SafetensorsFile::open(directory / "bad.safetensors"); });
    EXPECT_MENTIONS(error, test.expected);
    EXPECT_MENTIONS(error, "bad.safetensors");
  }
  EXPECT_MENTIONS(config_error([&] { SafetensorsFile::open(directory / "none"); }), "No such file");
  EXPECT_MENTIONS(config_error([&] { SafetensorsFile::open(directory.path()); }),
                  "not a regular file");
}

TEST(SafetensorsWriter, NothingIsThereBeforeFinish) {
  TemporaryDirectory directory;
  const float value = 2;
  {
    SafetensorsWriter writer(directory / "a.safetensors", {{"x", "F32", {1}}});
    writer.write("x", &value, 4);
    EXPECT_FALSE(std::filesystem::exists(directory / "a.safetensors"));
  }
  EXPECT_TRUE(list(directory.path()).empty()) << list(directory.path())[0];
  SafetensorsWriter writer(directory / "a.safetensors", {{"x", "F32", {1}}});
  writer.write("x", &value, 4);
  writer.finish();
  EXPECT_EQ(list(directory.path()), (std::vector<std::string>{"a.safetensors"}));
}

TEST(SafetensorsWriter, PiecesInAnyOrderOfTensors) {
  TemporaryDirectory directory;
  const std::vector<float> x{1, 2, 3}, y{4, 5};
  SafetensorsWriter writer(directory / "a", {{"x", "F32", {3}}, {"y", "F32", {2}}});
  writer.write("y", &y[0], 4);
  writer.write("x", &x[0], 8);
  writer.write("y", &y[1], 4);
  EXPECT_THROW(writer.finish(), LogicError);  // x lacks 4 bytes
  EXPECT_THROW(writer.write("x", &x[0], 8), LogicError);
  EXPECT_THROW(writer.write("z", &x[0], 4), LogicError);
  writer.write("x", &x[2], 4);
  writer.finish();
  EXPECT_THROW(writer.finish(), LogicError);
  const SafetensorsFile file = SafetensorsFile::open(directory / "a");
  EXPECT_EQ(file.read_all<float>("x"), x);
  EXPECT_EQ(file.read_all<float>("y"), y);
}

TEST(SafetensorsWriter, RefusesWhatNoReaderTakes) {
  TemporaryDirectory directory;
  using Specs = std::vector<TensorSpec>;
  EXPECT_THROW(SafetensorsWriter(directory / "a", Specs{{"x", "F32", {1}}, {"x", "F32", {1}}}),
               LogicError);
  EXPECT_THROW(SafetensorsWriter(directory / "a", Specs{{"x", "F33", {1}}}), LogicError);
  EXPECT_THROW(SafetensorsWriter(directory / "a", Specs{{"\xff", "F32", {1}}}), ConfigError);
  EXPECT_MENTIONS(config_error([&] {
                    SafetensorsWriter(directory / "no/such/a", Specs{{"x", "F32", {1}}});
                  }),
                  "No such file");
  EXPECT_TRUE(list(directory.path()).empty());
}

TEST(AtomicDirectory, AppearsWholeOrNotAtAll) {
  TemporaryDirectory directory;
  const std::filesystem::path out = directory / "out";
  {
    AtomicDirectory writing(out);
    write_text_file(writing.temporary() / "f", "half");
    EXPECT_FALSE(std::filesystem::exists(out));
  }
  EXPECT_TRUE(list(directory.path()).empty());
  {
    AtomicDirectory writing(out.string() + "/");
    write_text_file(writing.temporary() / "f", "first");
    writing.finish();
  }
  EXPECT_EQ(read_text_file(out / "f"), "first");
  EXPECT_MENTIONS(config_error([&] { AtomicDirectory again(out); }), "not empty");
  {
    AtomicDirectory writing(out, true);
    write_text_file(writing.temporary() / "g", "second");
    EXPECT_EQ(list(out), (std::vector<std::string>{"f"}));
    writing.finish();
  }
  EXPECT_EQ(list(out), (std::vector<std::string>{"g"}));
  EXPECT_EQ(list(directory.path()), (std::vector<std::string>{"out"}));
  EXPECT_MENTIONS(config_error([&] { AtomicDirectory file(out / "g"); }), "is a file");
}

}  // namespace
}  // namespace rowshard::testing
