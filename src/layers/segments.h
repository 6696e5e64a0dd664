// Where each sequence of a packed micro-batch lies. All sequences are concatenated along the token
// dimension; a token sees only tokens of its own segment that are not after it.
//
// The device side is one row of numbers per token, so kernels need no search and their grids depend
// on the number of tokens only: a graph captured for T tokens serves every packing of T tokens.
// cuDNN's attention is the exception: its calls follow from the lengths (layers/attention.h).
#pragma once

#include <vector>

#include "core/arena.h"

namespace rowshard {

/// Of the segments between cumulative bounds, in descending order.
std::vector<int32_t> lengths_of(const std::vector<int32_t>& bounds);

class Segments {
 public:
  /// bounds: cumulative lengths, 0 = bounds[0] < bounds[1] < … < bounds[S] = T. Throws ShapeError
  /// when they do not ascend.
  Segments(std::vector<int32_t> bounds, Context& ctx);

  /// New bounds for the same number of tokens, at the same device addresses.
  void assign(std::vector<int32_t> bounds, Stream& stream);

  const std::vector<int32_t>& bounds() const { return bounds_; }
  int64_t count() const { return static_cast<int64_t>(bounds_.size()) - 1; }
  int64_t tokens() const { return bounds_.back(); }
  int64_t longest() const { return lengths_.front(); }
  /// Of the segments, in descending order.
  const std::vector<int32_t>& lengths() const { return lengths_; }

  ConstView starts() const { return starts_; }        // [T] i32, first token of my segment
  ConstView ends() const { return ends_; }            // [T] i32, one past its last token
  ConstView positions() const { return positions_; }  // [T] i32, index in my segment, for RoPE
  /// [T, 2] i32: start and length of each segment in descending order of length, then (T, 0).
  ConstView by_length() const { return by_length_; }

 private:
  std::vector<int32_t> bounds_;
  std::vector<int32_t> lengths_;
  Tensor starts_, ends_, positions_, by_length_;
};

}  // namespace rowshard
