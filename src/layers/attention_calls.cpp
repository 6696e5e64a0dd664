#include "layers/attention_calls.h"

namespace rowshard::cuda {
namespace {

int64_t power_of_two_up(int64_t value) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(value)));
}
int64_t power_of_two_down(int64_t value) {
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(value)));
}

bool is_dense(const Segments& segments) {
  return segments.tokens() == segments.count() * segments.longest() &&
         segments.longest() % 128 == 0;
}

}  // namespace

std::vector<AttentionCall> forward_calls(const Segments& segments, int64_t kv_heads) {
  if (is_dense(segments))
    return {{0, segments.count(), segments.longest(), kv_heads, true}};
  return {
      {0, power_of_two_up(segments.count()), length_bucket(segments.longest()), kv_heads, false}};
}

std::vector<AttentionCall> backward_calls(const Segments& segments, int64_t heads,
                                          int64_t kv_heads) {
  const int64_t limit = score_limit(segments.tokens(), heads), count = segments.count();
  const bool dense = is_dense(segments);
  std::vector<AttentionCall> calls;
  for (int64_t first = 0; first < count;) {
    const int64_t length = dense ? segments.longest() : length_bucket(segments.lengths()[first]);
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
