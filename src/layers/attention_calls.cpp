#include "layers/attention_calls.h"

#include <numeric>

namespace rowshard::cuda {
namespace {

int64_t power_of_two_up(int64_t value) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(value)));
}
int64_t power_of_two_down(int64_t value) {
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(value)));
}

bool is_dense(std::span<const int32_t> lengths) {
  return lengths.front() == lengths.back() && lengths.front() % 128 == 0;
}

}  // namespace

std::vector<AttentionCall> forward_calls(std::span<const int32_t> lengths, int64_t kv_heads) {
  const auto count = static_cast<int64_t>(lengths.size());
  if (is_dense(lengths))
    return {{0, count, lengths.front(), kv_heads, true}};
  return {{0, power_of_two_up(count), length_bucket(lengths.front()), kv_heads, false}};
}

std::vector<AttentionCall> backward_calls(std::span<const int32_t> lengths, int64_t heads,
                                          int64_t kv_heads) {
  const auto count = static_cast<int64_t>(lengths.size());
  const int64_t limit =
      score_limit(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), heads);
  const bool dense = is_dense(lengths);
  std::vector<AttentionCall> calls;
  for (int64_t first = 0; first < count;) {
    const int64_t length = dense ? lengths.front() : length_bucket(lengths[first]);
    int64_t most = std::max<int64_t>(1, limit / score_bytes(heads, length)), rest = count - first;
    if (!dense) {
      most = power_of_two_down(most);
      rest = power_of_two_up(rest);
    }
    AttentionCall call{first, std::min(most, rest), length, kv_heads, dense};
    while (call.kv_heads > 1 &&
           (kv_heads % call.kv_heads != 0 ||
            call.count * score_bytes(heads / kv_heads * call.kv_heads, length) > limit)) {
      --call.kv_heads;
    }
    calls.push_back(call);
    first += call.count;
  }
  return calls;
}

}  // namespace rowshard::cuda

namespace rowshard {

std::vector<int64_t> attention_layout(const std::vector<int32_t>& bounds, int64_t heads,
                                      int64_t kv_heads, int64_t head_dim) {
  std::vector<int64_t> layout;
  if (!ROWSHARD_CUDNN || !cuda::cudnn_takes(head_dim))
    return layout;
  const std::vector<int32_t> lengths = lengths_of(bounds);
  for (const auto& calls :
       {cuda::forward_calls(lengths, kv_heads), cuda::backward_calls(lengths, heads, kv_heads)}) {
    for (const cuda::AttentionCall& call : calls)
      layout.insert(layout.end(), {call.count, call.length, call.kv_heads, call.dense});
  }
  return layout;
}

}  // namespace rowshard
