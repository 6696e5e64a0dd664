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
    if (weight.trainable) {
      ROWSHARD_CHECK(!is_mx(weight.storage), ConfigError, "unit ", name_, ": ", weight.name,
                     " is an MX weight and cannot be trained: store it as 128x128 blocks or plain");
      add_trainable(static_cast<int>(offsets_.size()));
      offsets_.push_back(-1);
      continue;
    }
    offsets_.push_back(end);
    end = round_up(end + weight.bytes(), kWeightAlignment);
  }
  shard_bytes_ = round_up(ceil_div(end, ranks), kWeightAlignment);
  for (TrainableLayout& layout : trainable_) {
    const WeightSpec& last = weights_[layout.weights.back()];
    layout.part =
        round_up(ceil_div(layout.offsets.back() + last.elements(), ranks), kWeightAlignment);
  }
}

void UnitLayout::add_trainable(int weight) {
  const WeightSpec& spec = weights_[weight];
  auto like = std::ranges::find_if(trainable_, [&](const TrainableLayout& layout) {
    return layout.storage == spec.storage && layout.dtype == spec.dtype;
  });
  if (like == trainable_.end())
    like = trainable_.insert(like, TrainableLayout{spec.storage, spec.dtype, {}, {}, 0});
  int64_t begin = 0;
  if (!like->weights.empty()) {
    begin = round_up(like->offsets.back() + weights_[like->weights.back()].elements(),
                     kWeightAlignment);
  }
  like->weights.push_back(weight);
  like->offsets.push_back(begin);
}

int64_t UnitLayout::transient_bytes() const {
  if (ranks_ == 1)
    return 0;
  int64_t bytes = gathered_bytes();
  for (const TrainableLayout& layout : trainable_)
    bytes += ranks_ * layout.part * size_of(layout.dtype);
  return bytes;
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
    if (weights_[i].trainable)
      continue;
    const int64_t from = std::max(begin, offsets_[i]);
    const int64_t to = std::min(end, offsets_[i] + weights_[i].bytes());
    if (from < to) {
      result.push_back({static_cast<int>(i), from - offsets_[i], to - offsets_[i], from - begin});
    }
  }
  return result;
}

}  // namespace rowshard
