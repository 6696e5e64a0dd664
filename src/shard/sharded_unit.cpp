#include "shard/sharded_unit.h"

#include <algorithm>
#include <cstring>

namespace rowshard {

ShardedUnit::ShardedUnit(UnitLayout layout, Communicator& gather_group, Arena& arena,
                         Communicator* regather_group)
    : layout_(std::move(layout)),
      gather_group_(gather_group),
      regather_group_(regather_group),
      arena_(arena) {
  ROWSHARD_CHECK(layout_.ranks() == gather_group.size(), LogicError, "unit ", name(),
                 " is laid out for ", layout_.ranks(), " ranks; its communicator has ",
                 gather_group.size());
  ROWSHARD_CHECK(!regather_group || layout_.ranks() % regather_group->size() == 0, LogicError,
                 "unit ", name(), " over ", layout_.ranks(), " ranks cannot be sharded over ",
                 regather_group ? regather_group->size() : 0);
  in_shard_.assign(layout_.weights().size(), -1);
  for (const UnitLayout::Piece& piece : layout_.pieces(gather_group.rank())) {
    const bool whole = piece.end - piece.begin == layout_.weights()[piece.weight].bytes();
    if (whole && !slices())
      in_shard_[piece.weight] = piece.shard_offset;
  }
  allocate();
  home_.assign(layout_.weights().size(), {-1, -1});
  for (const TrainableLayout& part : layout_.trainable()) {
    for (size_t i = 0; i < part.weights.size(); ++i)
      home_[part.weights[i]] = {static_cast<int>(trainable_.size()), static_cast<int>(i)};
    trainable_.push_back(std::make_unique<TrainablePart>(layout_.name(), layout_.weights(), part,
                                                         gather_group, arena));
  }
  for (const WeightSpec& weight : layout_.weights()) {
    if (weight.trainable) {
      matrices_.push_back(nullptr);
      scales_.emplace_back();
      continue;
    }
    if (is_mx(weight.storage)) {
      const bool rowwise = weight.storage == Storage::kMxRowwise;
      matrices_.push_back(std::make_unique<Fp8Matrix>(weight.name, weight.shape[rowwise ? 0 : 1],
                                                      weight.shape[rowwise ? 1 : 0],
                                                      Grouping::kMx1x32, arena.device()));
      scales_.emplace_back();
      continue;
    }
    if (weight.storage != Storage::kFp8Block) {
      matrices_.push_back(nullptr);
      scales_.emplace_back();
      continue;
    }
    matrices_.push_back(std::make_unique<Fp8Matrix>(weight.name, weight.shape[0], weight.shape[1],
                                                    Grouping::k128x128, arena.device()));
    scales_.push_back(
        arena.tensor(Category::kScales, weight.name, DType::kF32,
                     gemm_scale_shape(Grouping::k128x128, weight.shape[0], weight.shape[1])));
  }
}

void ShardedUnit::allocate() {
  const auto& weights = layout_.weights();
  const bool columnwise = std::ranges::any_of(
      weights, [](const WeightSpec& weight) { return weight.storage == Storage::kMxColumnwise; });
  shard_ = arena_.allocate(columnwise ? Category::kColumnwise : Category::kRowwiseShard, name(),
                           layout_.shard_bytes());
  if (layout_.ranks() == 1)
    return;
  std::vector<ByteRange> copied;
  if (slices())
    copied.push_back({0, layout_.shard_bytes()});
  for (const UnitLayout::Piece& piece : layout_.pieces(gather_group_.rank())) {
    if (!slices() && in_shard_[piece.weight] < 0)
      copied.push_back({piece.shard_offset, piece.shard_offset + piece.end - piece.begin});
  }
  fixed_ = gather_group_.fix(shard(), std::move(copied));
}

ConstView ShardedUnit::shard() const {
  return ConstView(shard_.data(), DType::kU8, {layout_.shard_bytes()}, arena_.device());
}

void ShardedUnit::drop() {
  reshard();
  fixed_.reset();
  shard_.reset();
  dropped_ = true;
}

void ShardedUnit::load(UnitSource& source, Stream& stream) {
  reshard();  // what is gathered, or bound in place, are the bytes of the last load
  if (dropped_)
    allocate();
  dropped_ = false;
  const Device device = arena_.device();
  // Zero first: the padding between weights is defined, so shards compare equal byte for byte.
  std::vector<std::byte> bytes(layout_.shard_bytes(), std::byte{0});
  for (const UnitLayout::Piece& piece : layout_.pieces(gather_group_.rank())) {
    source.read(layout_.weights()[piece.weight], piece.begin, piece.end,
                bytes.data() + piece.shard_offset);
  }
  bound_before_ = false;
  stream.synchronize();
  gather_group_.barrier();  // no peer gathers the bytes of the last load any more
  const Shape shape{layout_.shard_bytes()};
  copy(View(shard_.data(), DType::kU8, shape, device),
       ConstView(bytes.data(), DType::kU8, shape, kHost), stream);
  stream.synchronize();
  for (size_t i = 0; i < matrices_.size(); ++i) {
    const WeightSpec& weight = layout_.weights()[i];
    if (weight.storage != Storage::kFp8Block || weight.trainable)
      continue;
    const int64_t block_rows = ceil_div(weight.shape[0], 128);
    const int64_t block_cols = ceil_div(weight.shape[1], 128);
    std::vector<float> compact(block_rows * block_cols);
    source.scales(weight, compact.data());
    // A band is quantised by whoever owns bytes of it; the bytes and the scale are the same on
    // every such rank, and 0 where a rank owns none, so the largest is the scale.
    const int64_t stride = scales_[i].shape()[1];
    std::vector<float> padded(block_rows * stride, 1.0f);
    for (int64_t row = 0; row < block_rows; ++row) {
      std::memcpy(&padded[row * stride], &compact[row * block_cols], block_cols * sizeof(float));
    }
    copy(scales_[i], ConstView(padded.data(), DType::kF32, scales_[i].shape(), kHost), stream);
    gather_group_.all_reduce(scales_[i], Reduction::kMax, stream);
    stream.synchronize();
  }
  for (const auto& part : trainable_)
    part->load(source, stream);
  gather_group_.barrier();  // every shard is there
}

void ShardedUnit::gather(Stream& communication) {
  ROWSHARD_CHECK(!bound_ && !arrival_, LogicError, "unit ", name(), " is gathered already");
  ROWSHARD_CHECK(loaded(), UsageError, "unit ", name(),
                 " was dropped; load it before it is gathered");
  if (layout_.ranks() > 1) {
    gathered_ = arena_.allocate(Category::kGathered, name(), layout_.gathered_bytes());
    const Device device = arena_.device();
    const View whole(gathered_.data(), DType::kU8, {layout_.gathered_bytes()}, device);
    Communicator& group = slice_ ? *regather_group_ : gather_group_;
    const int64_t received = whole.bytes() - whole.bytes() / group.size();
    gather_span_ = TraceSpan(communication, TraceLane::kGathers, name(), received);
    if (slice_) {
      group.all_gather(whole, ConstView(slice_.data(), DType::kU8, {slice_.bytes()}, device),
                       communication);
    } else {
      group.all_gather(whole, *fixed_, communication);
    }
    if (device.is_cuda())
      gather_span_.end();
  }
  for (const auto& part : trainable_)
    part->gather(communication);
  arrival_.emplace(arena_.device());
  arrival_->record(communication);
}

void ShardedUnit::finish_gather(Stream& compute) {
  ROWSHARD_CHECK(arrival_, LogicError, "unit ", name(), " has no gather to finish");
  compute.wait(*arrival_);
  gather_span_.end();
  arrival_.reset();
  slice_.reset();
  for (const auto& part : trainable_)
    part->bind();
  bind();
}

std::byte* ShardedUnit::place(size_t weight) const {
  if (in_shard_[weight] >= 0)
    return shard_.data() + in_shard_[weight];
  return gathered_.data() + layout_.offset(static_cast<int>(weight));
}

void ShardedUnit::bind() {
  bound_ = true;
  // Frozen bytes: what is gathered again is what was there, so a resident columnwise copy stays
  // true.
  for (size_t i = 0; i < matrices_.size(); ++i) {
    if (!matrices_[i])
      continue;
    const WeightSpec& weight = layout_.weights()[i];
    std::byte* at = place(i);
    const View codes(at, DType::kE4M3, weight.shape, arena_.device());
    View scales = scales_[i];
    if (is_mx(weight.storage)) {
      scales = View(at + weight.mx_scale_offset(), DType::kE8M0, weight.mx_scale_shape(),
                    arena_.device());
    }
    if (weight.storage == Storage::kMxColumnwise) {
      matrices_[i]->bind_columnwise(codes, scales);
    } else {
      matrices_[i]->bind_rowwise(codes, scales,
                                 bound_before_ ? Contents::kUnchanged : Contents::kNew);
    }
  }
  bound_before_ = true;
}

void ShardedUnit::unbind() {
  for (const auto& part : trainable_)
    part->reshard();
  for (auto& matrix : matrices_) {
    if (!matrix || !bound_)
      continue;
    matrix->unbind_rowwise();
    if (!rebuildable(matrix->grouping()))
      matrix->unbind_columnwise();
  }
  bound_ = false;
}

void ShardedUnit::reshard() {
  if (arrival_) {  // a gather nobody used: it must not write into memory given to others
    arrival_->synchronize();
    arrival_.reset();
    gather_span_.end();
  }
  unbind();
  slice_.reset();
  gathered_.reset();
}

void ShardedUnit::reshard_to_group(Stream& compute) {
  ROWSHARD_CHECK(bound_, LogicError, "unit ", name(), " is not gathered");
  ROWSHARD_CHECK(regather_group_, LogicError, "unit ", name(), " has no smaller group");
  if (layout_.ranks() > 1) {
    const int64_t bytes = layout_.gathered_bytes() / regather_group_->size();
    slice_ = arena_.allocate(Category::kGathered, name(), bytes);
    const View to(slice_.data(), DType::kU8, {bytes}, arena_.device());
    copy(to,
         ConstView(gathered_.data() + regather_group_->rank() * bytes, DType::kU8, {bytes},
                   arena_.device()),
         compute);
  }
  unbind();
  gathered_.reset();
}

void ShardedUnit::drop_columnwise() {
  for (auto& matrix : matrices_) {
    if (matrix && rebuildable(matrix->grouping()))
      matrix->discard({.rowwise = false, .columnwise = true});
  }
}

void UnitSource::read_masters(const WeightSpec& weight, int64_t, int64_t, float*) {
  throw LogicError(message("this source has no values of ", weight.name, " to be trained"));
}

View ShardedUnit::gradient(int weight, Stream& stream) {
  const auto [part, place] = home_[weight];
  ROWSHARD_CHECK(part >= 0, LogicError, layout_.weights()[weight].name, " is frozen");
  return trainable_[part]->gradient(place, stream);
}

Fp8Matrix& ShardedUnit::fp8(int weight) {
  ROWSHARD_CHECK(bound_, UsageError, "weight ", layout_.weights()[weight].name, " of unit ", name(),
                 " is sharded; acquire the unit from the usage scheduler first");
  if (home_[weight].first >= 0)
    return trainable_[home_[weight].first]->fp8(home_[weight].second);
  ROWSHARD_CHECK(matrices_[weight], LogicError, layout_.weights()[weight].name,
                 " is not an FP8 weight");
  return *matrices_[weight];
}

ConstView ShardedUnit::plain(int weight) const {
  const WeightSpec& spec = layout_.weights()[weight];
  ROWSHARD_CHECK(bound_, UsageError, "weight ", spec.name, " of unit ", name(),
                 " is sharded; acquire the unit from the usage scheduler first");
  ROWSHARD_CHECK(spec.storage == Storage::kPlain, LogicError, spec.name, " is an FP8 weight");
  if (home_[weight].first >= 0)
    return trainable_[home_[weight].first]->plain(home_[weight].second);
  return ConstView(place(weight), spec.dtype, spec.shape, arena_.device());
}

}  // namespace rowshard
