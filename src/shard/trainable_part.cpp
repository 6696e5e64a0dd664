#include "shard/trainable_part.h"

#include <algorithm>

#include "fp8/range_quantize.h"
#include "shard/sharded_unit.h"

namespace rowshard {

TrainablePart::TrainablePart(const std::string& unit, const std::vector<WeightSpec>& weights,
                             const TrainableLayout& layout, Communicator& group, Arena& arena)
    : unit_(unit), layout_(layout), group_(group), arena_(arena) {
  int64_t blocks = 0;
  for (const int weight : layout.weights) {
    const WeightSpec& spec = weights[weight];
    specs_.push_back(spec);
    amax_offset_.push_back(blocks);
    matrices_.push_back(nullptr);
    scales_.emplace_back();
    if (!is_fp8())
      continue;
    blocks += ceil_div(spec.shape[0], 128) * ceil_div(spec.shape[1], 128);
    matrices_.back() = std::make_unique<Fp8Matrix>(spec.name, spec.shape[0], spec.shape[1],
                                                   Grouping::k128x128, arena.device());
    scales_.back() =
        arena.tensor(Category::kScales, spec.name, DType::kF32,
                     gemm_scale_shape(Grouping::k128x128, spec.shape[0], spec.shape[1]));
  }
  const Shape part{layout.part};
  masters_ = arena.tensor(Category::kOptimizer, unit + ".masters", DType::kF32, part);
  gradient_part_ = arena.tensor(Category::kOptimizer, unit + ".gradient_part", DType::kF32, part);
  stored_ = arena.tensor(Category::kRowwiseShard, unit + ".trainable", layout.dtype, part);
  if (blocks > 0)
    amax_ = arena.tensor(Category::kWorkspace, unit + ".amax", DType::kF32, {blocks});
}

TrainablePart::Run TrainablePart::run(size_t place) const {
  const int64_t first = group_.rank() * layout_.part;
  const int64_t start = layout_.offsets[place];
  const int64_t begin = std::max(start, first);
  const int64_t end = std::min(start + specs_[place].elements(), first + layout_.part);
  return begin < end ? Run{begin - start, end - start, begin - first} : Run{0, 0, 0};
}

View TrainablePart::amax_of(size_t place) const {
  const Shape& shape = specs_[place].shape;
  const int64_t rows = ceil_div(shape[0], 128), cols = ceil_div(shape[1], 128);
  return amax_.view().slice_rows(amax_offset_[place], rows * cols).reshape({rows, cols});
}

void TrainablePart::load(UnitSource& source, Stream& stream) {
  std::vector<float> values(layout_.part, 0.0f);
  for (size_t i = 0; i < specs_.size(); ++i) {
    const Run own = run(i);
    if (own.begin < own.end)
      source.read_masters(specs_[i], own.begin, own.end, values.data() + own.at);
  }
  copy(masters_, ConstView(values.data(), DType::kF32, masters_.shape(), kHost), stream);
  stream.synchronize();
  refresh(stream);
}

void TrainablePart::refresh(Stream& stream) {
  ROWSHARD_CHECK(!bound_ && !gathered_, LogicError, "unit ", unit_,
                 ": trainable weights change while they are gathered; reshard the unit first");
  changed_ = true;
  if (!is_fp8()) {
    convert(stored_, masters_, stream);
    return;
  }
  const auto each_run = [&](const auto& call) {
    for (size_t i = 0; i < specs_.size(); ++i) {
      const Run own = run(i);
      if (own.begin < own.end)
        call(i, own, masters_.view().slice_rows(own.at, own.end - own.begin));
    }
  };
  fill_bytes(stored_, 0, stream);  // padding
  fill_bytes(amax_, 0, stream);
  each_run([&](size_t i, const Run& own, const View& values) {
    range_amax(amax_of(i), values, own.begin, specs_[i].shape[1], stream);
  });
  group_.all_reduce(amax_, Reduction::kMax, stream);
  each_run([&](size_t i, const Run& own, const View& values) {
    range_encode(stored_.view().slice_rows(own.at, own.end - own.begin), values, own.begin,
                 specs_[i].shape[1], amax_of(i), {}, stream);
  });
  for (size_t i = 0; i < specs_.size(); ++i)
    block_scales(scales_[i], amax_of(i), {}, stream);
}

void TrainablePart::reduce_gradient(Communicator* replicas, Stream& stream) {
  gradient(0, stream);  // zeros where this rank had no tokens
  group_.reduce_scatter(gradient_part_, gradient_, Reduction::kSum, stream);
  if (replicas)
    replicas->all_reduce(gradient_part_, Reduction::kSum, stream);
  gradient_.reset();
}

void TrainablePart::gather(Stream& communication) {
  if (group_.size() == 1)
    return;
  const int64_t bytes = stored_.view().bytes();
  gathered_ = arena_.allocate(Category::kGathered, unit_, bytes * group_.size());
  const Device device = arena_.device();
  group_.all_gather(View(gathered_.data(), DType::kU8, {bytes * group_.size()}, device),
                    ConstView(stored_.view().data, DType::kU8, {bytes}, device), communication);
}

void TrainablePart::bind() {
  bound_ = true;
  if (!is_fp8())
    return;
  std::byte* base = group_.size() > 1 ? gathered_.data() : stored_.view().byte_data();
  for (size_t i = 0; i < specs_.size(); ++i) {
    matrices_[i]->bind_rowwise(
        View(base + layout_.offsets[i], DType::kE4M3, specs_[i].shape, arena_.device()), scales_[i],
        changed_ ? Contents::kNew : Contents::kUnchanged);
  }
  changed_ = false;
}

void TrainablePart::reshard() {
  for (const auto& matrix : matrices_) {
    if (matrix && bound_)
      matrix->unbind_rowwise();
  }
  bound_ = false;
  gathered_.reset();
}

Fp8Matrix& TrainablePart::fp8(int place) {
  ROWSHARD_CHECK(matrices_[place], LogicError, specs_[place].name, " is not an FP8 weight");
  return *matrices_[place];
}

ConstView TrainablePart::plain(int place) const {
  ROWSHARD_CHECK(!is_fp8(), LogicError, specs_[place].name, " is an FP8 weight");
  const std::byte* base = group_.size() > 1 ? gathered_.data() : stored_.view().byte_data();
  return ConstView(base + layout_.offsets[place] * size_of(layout_.dtype), layout_.dtype,
                   specs_[place].shape, arena_.device());
}

View TrainablePart::gradient(int place, Stream& stream) {
  if (!gradient_) {
    gradient_ = arena_.tensor(Category::kOptimizer, unit_ + ".gradient", DType::kF32,
                              {layout_.part * group_.size()});
    fill_bytes(gradient_, 0, stream);
  }
  return gradient_.view()
      .slice_rows(layout_.offsets[place], specs_[place].elements())
      .reshape(specs_[place].shape);
}

}  // namespace rowshard
