#include "model/weight_source.h"

#include <algorithm>
#include <cstring>

#include "fp8/quantize.h"

namespace rowshard {

namespace {

constexpr int64_t kBand = 128;

bool ends_with(const std::string& text, const std::string& tail) {
  return text.size() >= tail.size() &&
         text.compare(text.size() - tail.size(), tail.size(), tail) == 0;
}

// A unit's weight is named after its module; only biases carry their own suffix.
std::string tensor_name(const WeightSpec& weight) {
  return ends_with(weight.name, ".bias") ? weight.name : weight.name + ".weight";
}

/// The weight's rows and columns, and where they begin in the checkpoint's tensor.
struct Place {
  int64_t rows, cols, row, col, whole_cols;

  explicit Place(const WeightSpec& weight)
      : rows(weight.shape[0]),
        cols(weight.shape.rank() == 2 ? weight.shape[1] : 1),
        row(weight.slice.row),
        col(weight.slice.col),
        whole_cols(weight.slice.is_whole() ? cols : weight.slice.cols) {}
};

}  // namespace

std::vector<std::byte> quantize_mx(const WeightSpec& weight, const std::vector<float>& values) {
  const bool columnwise = weight.storage == Storage::kMxColumnwise;
  const Shape matrix = columnwise ? Shape{weight.shape[1], weight.shape[0]} : weight.shape;
  std::vector<std::byte> bytes(weight.bytes(), std::byte{0});
  const Fp8View copy{
      View(bytes.data(), DType::kE4M3, weight.shape, kHost),
      View(bytes.data() + weight.mx_scale_offset(), DType::kE8M0, weight.mx_scale_shape(), kHost),
      Grouping::kMx1x32};
  Stream stream(kHost);
  quantize(columnwise ? nullptr : &copy, columnwise ? &copy : nullptr,
           ConstView(values.data(), DType::kF32, matrix, kHost), {}, stream);
  return bytes;
}

CheckpointSource::CheckpointSource(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

void CheckpointSource::read(const WeightSpec& weight, int64_t begin, int64_t end,
                            std::byte* destination) {
  const std::string name = tensor_name(weight);
  if (weight.storage == Storage::kPlain)
    return read_plain(weight, name, begin, end, destination);
  if (is_mx(weight.storage))
    return read_mx(weight, name, begin, end, destination);
  if (checkpoint_.is_fp8(name))
    return read_stored(weight, name, begin, end, destination);
  quantize_bands(weight, name, begin, end, destination);
}

void CheckpointSource::read_stored(const WeightSpec& weight, const std::string& name, int64_t begin,
                                   int64_t end, std::byte* destination) {
  const Place at(weight);
  const int64_t element = size_of(weight.dtype);
  const int64_t row_bytes = at.cols * element, whole_row_bytes = at.whole_cols * element;
  const int64_t first = at.row * whole_row_bytes + at.col * element;
  if (row_bytes == whole_row_bytes) {  // rows lie one after another in the file too
    checkpoint_.tensors().read(name, first + begin, end - begin, destination);
    return;
  }
  for (int64_t from = begin; from < end;) {
    const int64_t row = from / row_bytes;
    const int64_t to = std::min(end, (row + 1) * row_bytes);
    checkpoint_.tensors().read(name, first + row * whole_row_bytes + (from - row * row_bytes),
                               to - from, destination + (from - begin));
    from = to;
  }
}

void CheckpointSource::read_plain(const WeightSpec& weight, const std::string& name, int64_t begin,
                                  int64_t end, std::byte* destination) {
  ROWSHARD_CHECK(!checkpoint_.is_fp8(name), ConfigError, name,
                 " is stored in FP8, but --recipe bf16 asks for unquantised weights; use --recipe "
                 "block, which takes the stored codes as they are");
  if (checkpoint_.tensors().at(name).dtype() == weight.dtype)
    return read_stored(weight, name, begin, end, destination);
  // Converted by whole rows; a range may begin and end inside an element.
  const Place at(weight);
  const int64_t row_bytes = at.cols * size_of(weight.dtype);
  const int64_t first = begin / row_bytes;
  const int64_t rows = ceil_div(end, row_bytes) - first;
  const std::vector<float> wide =
      checkpoint_.read_block_f32(name, at.row + first, rows, at.col, at.cols);
  std::vector<std::byte> converted(rows * row_bytes);
  convert(View(converted.data(), weight.dtype, {rows, at.cols}, kHost),
          ConstView(wide.data(), DType::kF32, {rows, at.cols}, kHost), stream_);
  std::memcpy(destination, converted.data() + (begin - first * row_bytes), end - begin);
}

void CheckpointSource::read_mx(const WeightSpec& weight, const std::string& name, int64_t begin,
                               int64_t end, std::byte* destination) {
  ROWSHARD_CHECK(!checkpoint_.is_fp8(name), ConfigError, name,
                 " is stored in FP8 with 128x128 blocks, which --recipe mx would quantise a second "
                 "time; use --recipe block");
  const bool columnwise = weight.storage == Storage::kMxColumnwise;
  const std::vector<std::byte> bytes =
      quantize_mx(weight, checkpoint_.read_rows_f32(name, 0, weight.shape[columnwise ? 1 : 0]));
  std::copy(bytes.begin() + begin, bytes.begin() + end, destination);
}

void CheckpointSource::quantize_bands(const WeightSpec& weight, const std::string& name,
                                      int64_t begin, int64_t end, std::byte* destination) {
  const Place at(weight);
  ROWSHARD_CHECK(at.row % kBand == 0 && at.col % kBand == 0, LogicError, weight.name,
                 " is cut inside a block, at row ", at.row, ", column ", at.col);
  const int64_t n = at.rows, k = at.cols;
  const int64_t block_cols = ceil_div(k, kBand);
  auto& scales = quantized_scales_[weight.name];
  scales.resize(ceil_div(n, kBand) * block_cols, 0.0f);
  for (int64_t band = begin / k / kBand; band * kBand * k < end; ++band) {
    const int64_t first = band * kBand;
    const int64_t rows = std::min(kBand, n - first);
    const std::vector<float> wide =
        checkpoint_.read_block_f32(name, at.row + first, rows, at.col, k);
    Tensor codes = arena_.tensor(Category::kWorkspace, "band.codes", DType::kE4M3, {rows, k});
    Tensor scale = arena_.tensor(Category::kWorkspace, "band.scales", DType::kF32,
                                 gemm_scale_shape(Grouping::k128x128, rows, k));
    const Fp8View rowwise{codes, scale, Grouping::k128x128};
    quantize(&rowwise, nullptr, ConstView(wide.data(), DType::kF32, {rows, k}, kHost),
             QuantizeOptions{}, stream_);
    std::copy_n(scale.as<float>(), block_cols, &scales[band * block_cols]);
    const int64_t from = std::max(begin, first * k);
    const int64_t to = std::min(end, (first + rows) * k);
    std::memcpy(destination + (from - begin), codes.view().byte_data() + (from - first * k),
                to - from);
  }
}

void CheckpointSource::scales(const WeightSpec& weight, float* destination) {
  const std::string name = tensor_name(weight);
  const Place at(weight);
  const int64_t block_rows = ceil_div(at.rows, kBand), block_cols = ceil_div(at.cols, kBand);
  if (checkpoint_.is_fp8(name)) {
    ROWSHARD_CHECK(at.row % kBand == 0 && at.col % kBand == 0, LogicError, weight.name,
                   " is cut inside a block, at row ", at.row, ", column ", at.col);
    const std::vector<float> stored = checkpoint_.read_scales(name);
    const int64_t stride = ceil_div(at.whole_cols, kBand);
    for (int64_t row = 0; row < block_rows; ++row) {
      std::copy_n(&stored[(at.row / kBand + row) * stride + at.col / kBand], block_cols,
                  destination + row * block_cols);
    }
    return;
  }
  const auto known = quantized_scales_.find(weight.name);
  if (known == quantized_scales_.end()) {  // this rank owns no byte of the weight
    std::fill_n(destination, block_rows * block_cols, 0.0f);
    return;
  }
  std::copy_n(known->second.data(), block_rows * block_cols, destination);
}

}  // namespace rowshard
