// Non-owning views of FP8 matrices: 8-bit codes plus scales; value = code x scale.
//
// A copy of a matrix is [outer, inner], both codes and groups contiguous along `inner`, the
// dimension a product contracts over. The rowwise copy of W [N, K] is [N, K]; its columnwise copy
// is Wᵀ [K, N]. Both are described by the same Fp8View, so one GEMM reads either.
//
//   grouping   scales of the GEMM layout                        compact layout (files, wire,
//   shards) k1x128     f32  [⌈inner/128⌉, R4(outer)], outer contiguous  f32  [outer, ⌈inner/128⌉]
//   k128x128   f32  [⌈outer/128⌉, R4(⌈inner/128⌉)]              f32  [⌈outer/128⌉, ⌈inner/128⌉]
//   kMx1x32    e8m0 [outer, ⌈inner/32⌉]                         the same
//   kMx32x32   e8m0 [⌈outer/32⌉, ⌈inner/32⌉]                    the same
//
// R4 rounds up to a multiple of 4. Padding of the GEMM layout holds scale 1; whoever writes scales
// writes the padding too. Blocks at the edge are simply smaller. docs/scale_layouts.md has
// pictures.
#pragma once

#include "core/view.h"
#include "fp8/formats.h"

namespace rowshard {

enum class Grouping { k1x128, k128x128, kMx1x32, kMx32x32 };
const char* to_string(Grouping grouping);

/// True when both copies share blocks, so that one is an exact re-labelling of the other.
constexpr bool rebuildable(Grouping grouping) {
  return grouping == Grouping::k128x128 || grouping == Grouping::kMx32x32;
}
constexpr bool is_mx(Grouping grouping) {
  return grouping == Grouping::kMx1x32 || grouping == Grouping::kMx32x32;
}
/// Elements of a block along outer and along inner.
constexpr int64_t outer_block(Grouping grouping) {
  return grouping == Grouping::k128x128 ? 128 : grouping == Grouping::kMx32x32 ? 32 : 1;
}
constexpr int64_t inner_block(Grouping grouping) {
  return is_mx(grouping) ? 32 : 128;
}

DType scale_dtype(Grouping grouping);
Shape gemm_scale_shape(Grouping grouping, int64_t outer, int64_t inner);
Shape compact_scale_shape(Grouping grouping, int64_t outer, int64_t inner);

/// GEMM layout.
struct Fp8View {
  View codes;   // [outer, inner] e4m3 or e5m2
  View scales;  // gemm_scale_shape
  Grouping grouping = Grouping::k128x128;

  int64_t outer() const { return codes.dim(0); }
  int64_t inner() const { return codes.dim(1); }
};
struct ConstFp8View {
  ConstView codes;
  ConstView scales;
  Grouping grouping = Grouping::k128x128;

  ConstFp8View() = default;
  ConstFp8View(ConstView codes_, ConstView scales_, Grouping grouping_)
      : codes(codes_), scales(scales_), grouping(grouping_) {}
  ConstFp8View(const Fp8View& view)  // NOLINT: reading is always allowed
      : codes(view.codes), scales(view.scales), grouping(view.grouping) {}
  int64_t outer() const { return codes.dim(0); }
  int64_t inner() const { return codes.dim(1); }
};

/// Compact layout: a type of its own, so that one is never taken for the other. Rows of whole
/// blocks can be cut off and concatenated bytewise.
struct CompactFp8View {
  View codes;   // [outer, inner] e4m3 or e5m2
  View scales;  // compact_scale_shape
  Grouping grouping = Grouping::k128x128;
};
struct ConstCompactFp8View {
  ConstView codes;
  ConstView scales;
  Grouping grouping = Grouping::k128x128;

  ConstCompactFp8View() = default;
  ConstCompactFp8View(ConstView codes_, ConstView scales_, Grouping grouping_)
      : codes(codes_), scales(scales_), grouping(grouping_) {}
  ConstCompactFp8View(const CompactFp8View& view)  // NOLINT
      : codes(view.codes), scales(view.scales), grouping(view.grouping) {}
};

std::string describe(const ConstFp8View& view);
/// Throws ShapeError naming `what` unless codes and scales fit together.
void check(const ConstFp8View& view, const char* what);
void check(const ConstCompactFp8View& view, const char* what);

/// Between the layouts, padding written. Codes are copied unless both views point at the same ones.
/// Work is queued on `stream`.
void to_gemm_layout(const Fp8View& y, const ConstCompactFp8View& x, Stream& stream);
void to_compact_layout(const CompactFp8View& y, const ConstFp8View& x, Stream& stream);

}  // namespace rowshard
