#include "model/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/error.h"

namespace rowshard {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

namespace {

// A header is a few hundred bytes a tensor; the format's own readers stop at this size too.
constexpr int64_t kMaxHeaderBytes = 100'000'000;

struct Tag {
  const char* name;
  int64_t bytes;
  int dtype;  // a DType, or -1
};
constexpr std::array<Tag, 16> kTags{{
    {"F64", 8, static_cast<int>(DType::kF64)},
    {"F32", 4, static_cast<int>(DType::kF32)},
    {"F16", 2, static_cast<int>(DType::kF16)},
    {"BF16", 2, static_cast<int>(DType::kBF16)},
    {"F8_E4M3", 1, static_cast<int>(DType::kE4M3)},
    {"F8_E5M2", 1, static_cast<int>(DType::kE5M2)},
    {"F8_E8M0", 1, static_cast<int>(DType::kE8M0)},
    {"U8", 1, static_cast<int>(DType::kU8)},
    {"I32", 4, static_cast<int>(DType::kI32)},
    {"I64", 8, static_cast<int>(DType::kI64)},
    {"BOOL", 1, -1},
    {"I8", 1, -1},
    {"I16", 2, -1},
    {"U16", 2, -1},
    {"U32", 4, -1},
    {"U64", 8, -1},
}};

const Tag* find_tag(const std::string& name) {
  for (const Tag& tag : kTags) {
    if (name == tag.name)
      return &tag;
  }
  return nullptr;
}

std::string dims_text(const std::vector<int64_t>& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(dims[i]);
  }
  return text + "]";
}

/// Product of dims times element size, or -1 when it does not fit 63 bits.
int64_t checked_bytes(const std::vector<int64_t>& dims, int64_t element) {
  int64_t bytes = element;
  for (int64_t dim : dims) {
    if (__builtin_mul_overflow(bytes, dim, &bytes))
      return -1;
  }
  return bytes;
}

/// A non-negative integer that fits int64; -1 for anything else.
int64_t as_count(const json& value) {
  if (!value.is_number_unsigned())
    return -1;
  const uint64_t number = value.get<uint64_t>();
  return number > static_cast<uint64_t>(INT64_MAX) ? -1 : static_cast<int64_t>(number);
}

TensorInfo parse_tensor(const std::string& where, const std::string& name, const json& entry) {
  const std::string what = message(where, ": tensor ", name);
  ROWSHARD_CHECK(entry.is_object() && entry.contains("dtype") && entry["dtype"].is_string() &&
                     entry.contains("shape") && entry["shape"].is_array() &&
                     entry.contains("data_offsets") && entry["data_offsets"].is_array() &&
                     entry["data_offsets"].size() == 2,
                 ConfigError, what, " has no dtype, shape and two data_offsets in the header");
  TensorInfo info;
  info.name = name;
  info.tag = entry["dtype"].get<std::string>();
  const Tag* tag = find_tag(info.tag);
  ROWSHARD_CHECK(tag != nullptr, ConfigError, what, " has dtype ", info.tag,
                 ", which rowshard does not know");
  for (const json& dim : entry["shape"]) {
    info.dims.push_back(as_count(dim));
    ROWSHARD_CHECK(info.dims.back() >= 0, ConfigError, what, " has a dimension ", dim.dump());
  }
  const int64_t begin = as_count(entry["data_offsets"][0]);
  const int64_t end = as_count(entry["data_offsets"][1]);
  ROWSHARD_CHECK(begin >= 0 && end >= begin, ConfigError, what, " has data_offsets ",
                 entry["data_offsets"].dump());
  info.offset = begin;
  info.bytes = end - begin;
  const int64_t wanted = checked_bytes(info.dims, tag->bytes);
  ROWSHARD_CHECK(wanted == info.bytes, ConfigError, what, " of ", info.describe(), " has ",
                 info.bytes, " bytes in the file instead of ",
                 wanted < 0 ? "a number that fits 63 bits" : std::to_string(wanted));
  return info;
}

}  // namespace

const char* safetensors_tag(DType dtype) {
  for (const Tag& tag : kTags) {
    if (tag.dtype == static_cast<int>(dtype))
      return tag.name;
  }
  throw LogicError("safetensors_tag: unknown dtype");
}

DType dtype_of_tag(const std::string& name) {
  const Tag* tag = find_tag(name);
  ROWSHARD_CHECK(tag != nullptr && tag->dtype >= 0, ConfigError,
                 "rowshard has no element type for ", name, " tensors");
  return static_cast<DType>(tag->dtype);
}

DType TensorInfo::dtype() const {
  const Tag* known = find_tag(tag);
  ROWSHARD_CHECK(known != nullptr && known->dtype >= 0, ConfigError, "tensor ", name, " is ",
                 describe(), ": rowshard has no element type for ", tag);
  return static_cast<DType>(known->dtype);
}

Shape TensorInfo::shape() const {
  switch (dims.size()) {
    case 0:
      return Shape{};
    case 1:
      return Shape{dims[0]};
    case 2:
      return Shape{dims[0], dims[1]};
    case 3:
      return Shape{dims[0], dims[1], dims[2]};
    case 4:
      return Shape{dims[0], dims[1], dims[2], dims[3]};
    default:
      throw ConfigError(message("tensor ", name, " is ", describe(), ": more than 4 dimensions"));
  }
}

int64_t TensorInfo::elements() const {
  int64_t product = 1;
  for (int64_t dim : dims)
    product *= dim;
  return product;
}

std::string TensorInfo::describe() const {
  return tag + " " + dims_text(dims);
}

SafetensorsFile SafetensorsFile::open(const fs::path& path) {
  SafetensorsFile result;
  result.path_ = path;
  result.file_ = open_for_reading(path);
  const std::string where = path.string();
  const int64_t file_bytes = size_of_file(result.file_, path);
  ROWSHARD_CHECK(file_bytes >= 8, ConfigError, where, ": ", file_bytes,
                 " bytes, too short for a safetensors file; download it again");
  std::array<uint8_t, 8> length_bytes;
  read_at(result.file_, path, 0, 8, length_bytes.data());
  uint64_t header_length = 0;
  for (int i = 7; i >= 0; --i)
    header_length = header_length << 8 | length_bytes[i];
  ROWSHARD_CHECK(header_length <= static_cast<uint64_t>(kMaxHeaderBytes), ConfigError, where,
                 ": the header claims ", header_length,
                 " bytes, so this is no safetensors file (a Git LFS pointer or a web page?)");
  const auto header_bytes = static_cast<int64_t>(header_length);
  ROWSHARD_CHECK(8 + header_bytes <= file_bytes, ConfigError, where, ": ", file_bytes,
                 " bytes, and the header alone needs ", 8 + header_bytes,
                 "; the file is truncated, download it again");

  std::string text(header_bytes, '\0');
  read_at(result.file_, path, 8, header_bytes, text.data());
  json header;
  try {
    header = json::parse(text);
  } catch (const json::exception& error) {
    throw ConfigError(message(where, ": the header is no valid JSON (", error.what(),
                              "); the file is damaged, download it again"));
  }
  ROWSHARD_CHECK(header.is_object(), ConfigError, where, ": the header is no JSON object");
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      ROWSHARD_CHECK(entry.is_object(), ConfigError, where, ": __metadata__ is no JSON object");
      for (const auto& [key, value] : entry.items()) {
        ROWSHARD_CHECK(value.is_string(), ConfigError, where, ": __metadata__ ", key,
                       " is no string");
        result.metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    result.tensors_[name] = parse_tensor(where, name, entry);
  }

  // The ranges must follow one another from 0 to the end of the file.
  std::vector<TensorInfo*> order;
  for (auto& [name, info] : result.tensors_)
    order.push_back(&info);
  std::sort(order.begin(), order.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::tie(a->offset, a->bytes) < std::tie(b->offset, b->bytes);
  });
  const int64_t data_begin = 8 + header_bytes;
  const int64_t data_bytes = file_bytes - data_begin;
  int64_t end = 0;
  const TensorInfo* previous = nullptr;
  for (TensorInfo* info : order) {
    ROWSHARD_CHECK(info->offset >= end, ConfigError, where, ": tensor ", info->name,
                   " begins at byte ", info->offset, ", inside tensor ",
                   previous ? previous->name : "", ", which ends at ", end,
                   "; the file is damaged");
    ROWSHARD_CHECK(info->offset == end, ConfigError, where, ": bytes ", end, " to ", info->offset,
                   " before tensor ", info->name, " belong to no tensor; the file is damaged");
    end = info->offset + info->bytes;
    ROWSHARD_CHECK(end <= data_bytes, ConfigError, where, ": tensor ", info->name, " ends at byte ",
                   end, " of ", data_bytes, "; the file is truncated, download it again");
    previous = info;
  }
  ROWSHARD_CHECK(end == data_bytes, ConfigError, where, ": ", data_bytes - end,
                 " bytes after the last tensor belong to none; the file is damaged");
  for (TensorInfo* info : order)
    info->offset += data_begin;
  return result;
}

const TensorInfo& SafetensorsFile::at(const std::string& name) const {
  const auto found = tensors_.find(name);
  ROWSHARD_CHECK(found != tensors_.end(), ConfigError, path_.string(), ": no tensor ", name, " (",
                 tensors_.size(), " others)");
  return found->second;
}

void SafetensorsFile::check_dtype(const std::string& name, DType wanted) const {
  const TensorInfo& info = at(name);
  ROWSHARD_CHECK(info.tag == safetensors_tag(wanted), ConfigError, path_.string(), ": tensor ",
                 name, " is ", info.describe(), ", and ", safetensors_tag(wanted), " is needed");
}

void SafetensorsFile::read(const std::string& name, int64_t byte_begin, int64_t byte_count,
                           void* destination) const {
  const TensorInfo& info = at(name);
  ROWSHARD_CHECK(byte_begin >= 0 && byte_count >= 0 && byte_begin <= info.bytes &&
                     byte_count <= info.bytes - byte_begin,
                 LogicError, path_.string(), ": ", byte_count, " bytes from ", byte_begin,
                 " of tensor ", name, ", which has ", info.bytes);
  read_at(file_, path_, info.offset + byte_begin, byte_count, destination);
}

int64_t TensorSpec::bytes() const {
  const Tag* known = find_tag(tag);
  ROWSHARD_CHECK(known != nullptr, LogicError, "tensor ", name, " declared with dtype ", tag);
  const int64_t total = checked_bytes(dims, known->bytes);
  ROWSHARD_CHECK(total >= 0, LogicError, "tensor ", name, " declared as ", dims_text(dims));
  return total;
}

SafetensorsWriter::SafetensorsWriter(fs::path path, const std::vector<TensorSpec>& specs,
                                     std::map<std::string, std::string> metadata)
    : path_(std::move(path)), temporary_(temporary_name(path_)) {
  metadata.try_emplace("format", "pt");
  std::vector<const TensorSpec*> order;
  for (const TensorSpec& spec : specs)
    order.push_back(&spec);
  const auto element = [](const TensorSpec* spec) {
    const Tag* tag = find_tag(spec->tag);
    return tag ? tag->bytes : 0;
  };
  std::sort(order.begin(), order.end(), [&](const TensorSpec* a, const TensorSpec* b) {
    const int64_t size_a = element(a), size_b = element(b);
    return size_a != size_b ? size_a > size_b : a->name < b->name;
  });

  ordered_json header;
  header["__metadata__"] = metadata;
  int64_t end = 0;
  for (const TensorSpec* spec : order) {
    const int64_t bytes = spec->bytes();
    ROWSHARD_CHECK(slots_.emplace(spec->name, Slot{end, bytes, 0}).second, LogicError, "tensor ",
                   spec->name, " declared twice for ", path_.string());
    header[spec->name] = {
        {"dtype", spec->tag}, {"shape", spec->dims}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& error) {
    throw ConfigError(message(path_.string(), ": a name or metadata is no UTF-8: ", error.what()));
  }
  text.append(round_up(static_cast<int64_t>(text.size()), 8) - text.size(), ' ');
  for (auto& [name, slot] : slots_)
    slot.offset += 8 + static_cast<int64_t>(text.size());

  std::array<uint8_t, 8> length;
  for (int i = 0; i < 8; ++i)
    length[i] = static_cast<uint8_t>(uint64_t{text.size()} >> (8 * i));
  file_ = create_for_writing(temporary_);
  try {
    write_at(file_, temporary_, 0, 8, length.data());
    write_at(file_, temporary_, 8, static_cast<int64_t>(text.size()), text.data());
  } catch (...) {  // the destructor does not run for a constructor that throws
    std::error_code ignored;
    fs::remove(temporary_, ignored);
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (finished_)
    return;
  std::error_code ignored;
  fs::remove(temporary_, ignored);
}

void SafetensorsWriter::write(const std::string& name, const void* data, int64_t bytes) {
  const auto found = slots_.find(name);
  ROWSHARD_CHECK(found != slots_.end(), LogicError, path_.string(), ": tensor ", name,
                 " was not declared");
  Slot& slot = found->second;
  ROWSHARD_CHECK(bytes >= 0 && bytes <= slot.bytes - slot.written, LogicError, path_.string(), ": ",
                 bytes, " more bytes for tensor ", name, ", which has ", slot.written, " of ",
                 slot.bytes);
  write_at(file_, temporary_, slot.offset + slot.written, bytes, data);
  slot.written += bytes;
}

void SafetensorsWriter::finish() {
  ROWSHARD_CHECK(!finished_, LogicError, path_.string(), ": finished twice");
  for (const auto& [name, slot] : slots_) {
    ROWSHARD_CHECK(slot.written == slot.bytes, LogicError, path_.string(), ": tensor ", name,
                   " has ", slot.written, " of ", slot.bytes, " bytes");
  }
  commit_file(file_, temporary_, path_);
  finished_ = true;
}

}  // namespace rowshard
