// The plan of one call of a linear layer: which copies of x and dy are made, what is saved, and
// what happens to the weight's columnwise copy. It follows from facts about this call and nothing
// else; no flag is remembered from construction.
//
//                       fprop reads        dgrad reads             wgrad reads
//   FP8                 x8, w rowwise      dy8, w columnwise       dy8, x8 columnwise
//   plain or override   x, w               dy, w                   dy, x
//
// So a frozen layer makes no columnwise x and no columnwise dy, with a bias or without, and saves
// no x beyond what its adapter reads. A bias gradient is a sum over dy and depends on no product.
#pragma once

#include "fp8/fp8_matrix.h"
#include "layers/columnwise_policy.h"

namespace rowshard {

/// What an FP8 layer computes its backward in.
enum class BackwardOverride {
  kNone,           // FP8
  kHighPrecision,  // x and the weight as they were before quantisation (a weight that has only FP8
                   // copies: dequantised)
  kDequantized,    // the values that fprop saw: x and the weight quantised and dequantised
};
const char* to_string(BackwardOverride value);  // "none", "high_precision", "dequantized"

struct LinearFacts {
  // Of the weight, now.
  bool fp8 = false;         // it has an FP8 matrix: fprop is an FP8 product
  bool rebuildable = true;  // square blocks and a rowwise copy: a dropped copy comes back exactly
  bool direct = true;       // 128x128 blocks: there is a dgrad that reads the rowwise copy
  bool has_columnwise = false;  // and it is not stale
  bool pinned = false;          // a recorded graph reads its columnwise copy
  // Of the call.
  bool backward = true;      // a backward of this forward follows. Not in inference, in validation,
                             // or in the first phase of a recomputed block
  bool dgrad = true;         // dx is wanted
  bool wgrad = false;        // the weight's gradient is wanted: it is trainable in this step
  bool adapter = false;      // LoRA reads x as it is, forward and backward
  bool input_again = false;  // the caller makes x again in backward, so nothing of it is saved
  bool capturing = false;    // the stream records a graph
  BackwardOverride backward_override = BackwardOverride::kNone;
  ColumnwisePolicy policy = ColumnwisePolicy::kRelease;  // of a frozen weight
};

/// What dgrad reads of the weight.
enum class DgradSource {
  kNone,        // no dgrad
  kPlain,       // the plain weight, or the FP8 weight dequantised
  kColumnwise,  // the columnwise copy that is there
  kRebuild,     // a columnwise copy made just before
  kDirect,      // the rowwise copy
  kAuto,        // kDirect or kRebuild, by the number of tokens
};
const char* to_string(DgradSource source);

struct LinearPlan {
  // Forward.
  Usage x8;              // copies of quantised x that it makes
  bool reads_x = false;  // x as it is is read: by an adapter or a plain product
  bool saves_x = false;  // a view of x as it is stays until backward
  Usage saves_x8;        // copies of quantised x that stay until backward
  // Backward.
  bool x_again = false;  // the caller must make x again
  Usage x8_again;        // and these copies of it
  Usage dy8;             // copies of quantised dy that it makes
  DgradSource dgrad = DgradSource::kNone;
  bool release = false;  // the columnwise copy is dropped right after dgrad
  bool pin = false;      // a graph being recorded reads the copy that is there: it must stay

  bool operator==(const LinearPlan&) const = default;
};

LinearPlan plan_linear(const LinearFacts& facts);
/// One line for people.
std::string to_string(const LinearPlan& plan);

}  // namespace rowshard
