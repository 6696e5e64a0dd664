// Scratch of attention, for the sources of this room only: in one place, so that the plan device
// allocates what the device it stands for would. It depends on the number of tokens, never on how
// they are cut into segments, so that the plan holds for every packing.
#pragma once

#include <algorithm>
#include <bit>

#include "layers/attention.h"

#ifndef ROWSHARD_CUDNN
#define ROWSHARD_CUDNN 0
#endif

namespace rowshard {

namespace host {

/// bf16 operands as f32 for the time of a call; no data for other dtypes.
struct AttentionScratch {
  Tensor q, k, v, o, d_o, dq, dk, dv;

  AttentionScratch(const ConstView& q_view, const ConstView& k_view, bool backward, Context& ctx) {
    if (q_view.dtype != DType::kBF16)
      return;
    const auto make = [&](const Shape& shape) {
      return ctx.arena.tensor(Category::kWorkspace, "attention.widened", DType::kF32, shape);
    };
    q = make(q_view.shape);
    k = make(k_view.shape);
    v = make(k_view.shape);
    o = make(q_view.shape);
    if (backward) {
      d_o = make(q_view.shape);
      dq = make(q_view.shape);
      dk = make(k_view.shape);
      dv = make(k_view.shape);
    }
  }
};

}  // namespace host

namespace cuda {

/// What cuDNN's plans depend on is rounded up, so that a few plans serve every micro-batch.
inline int64_t length_bucket(int64_t length) {
  return std::max<int64_t>(128, std::bit_ceil(static_cast<uint64_t>(length)));
}
inline int64_t token_bucket(int64_t tokens) {
  return round_up(tokens, std::max<int64_t>(256, length_bucket(tokens) / 8));
}

/// The deterministic backward keeps the gradients of the scores, [heads, length, length] bf16 of
/// each segment of a call. Calls are cut so that these stay below what one segment of all tokens
/// takes, and below kScoreBytes. Where a single key head needs more it is our own kernels' turn.
inline constexpr int64_t kScoreBytes = int64_t{2} << 30;

inline int64_t score_bytes(int64_t heads, int64_t length) {
  return heads * length * length * 2;
}
inline int64_t score_limit(int64_t tokens, int64_t heads) {
  const int64_t longest = length_bucket(tokens);
  return std::min(score_bytes(heads, longest), kScoreBytes);
}

inline bool cudnn_takes(int64_t head_dim) {
  return head_dim == 64 || head_dim == 128;
}
/// Shapes that cuDNN takes; null or the reason why not.
inline const char* cudnn_refuses(const ConstView& q, const ConstView& k) {
  if (!ROWSHARD_CUDNN)
    return "this build has no cudnn-frontend (launch/setup gets it)";
  if (q.dtype != DType::kBF16 || !cudnn_takes(q.dim(2)))
    return "cuDNN is used for bf16 with heads of 64 and 128";
  if (score_bytes(q.dim(1) / k.dim(1), length_bucket(q.dim(0))) > kScoreBytes)
    return "the deterministic backward of cuDNN would need more than 2 GiB for a key head";
  return nullptr;
}

struct AttentionScratch {
  Tensor table;      // u8; offsets and lengths of the segments, for cuDNN
  Buffer workspace;  // of cuDNN
  Tensor delta;      // [T, Hq] f32; do · o, for our own backward

  AttentionScratch(const ConstView& q, const ConstView& k, bool backward, Context& ctx) {
    const int64_t tokens = q.dim(0), heads = q.dim(1), kv_heads = k.dim(1);
    if (!cudnn_refuses(q, k)) {
      table = ctx.arena.tensor(Category::kWorkspace, "attention.table", DType::kU8,
                               {table_entries(tokens) * kTableEntry});
      workspace = ctx.arena.allocate(
          Category::kWorkspace, "attention.workspace",
          backward ? workspace_bytes(tokens, heads, kv_heads, q.dim(2)) : kForwardWorkspace);
    } else if (backward) {
      delta =
          ctx.arena.tensor(Category::kWorkspace, "attention.delta", DType::kF32, {tokens, heads});
    }
  }

  static constexpr int64_t kForwardWorkspace = int64_t{1} << 20;  // it asks for a few bytes
  /// Three offsets of 8 bytes and a length of 4.
  static constexpr int64_t kTableEntry = 28;
  /// A call's number of segments is rounded up to a power of two, and one offset follows the last.
  static int64_t table_entries(int64_t tokens) { return 2 * tokens + 2; }

  /// The scores, do · o of every row, dk and dv of every query head, and what lies between.
  static int64_t workspace_bytes(int64_t tokens, int64_t heads, int64_t kv_heads,
                                 int64_t head_dim) {
    const int64_t scores = score_limit(tokens, heads);
    const int64_t of_query_heads =
        heads == kv_heads ? 0 : 2 * token_bucket(tokens) * heads * head_dim * 4;
    return scores + scores / 32 + of_query_heads + (int64_t{1} << 20);
  }
};

}  // namespace cuda

}  // namespace rowshard
