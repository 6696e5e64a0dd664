// The trainable weights of a unit that are stored alike, split over the ranks.
//
//   masters        f32 [part]   this rank's elements in full precision
//   stored         [part]       the same as the unit stores them: e4m3 codes, or plain elements
//   gradient       f32 [whole]  of this rank's tokens, while there is one
//   gradient_part  f32 [part]   summed over the ranks
//
// A part begins and ends anywhere, also inside a 128x128 block: `refresh` takes each rank's largest
// magnitudes of every block it touches, and one maximum over the ranks, of all blocks of all
// weights in one message, makes the scales those of the whole matrices. So the codes are what
// `quantize` makes of the whole matrix, bit for bit, at any number of ranks.
//
// Ownership: the gathered vector exists between gather and reshard, the gradient between the first
// `gradient` and `reduce_gradient`. An optimiser updates `masters` with `gradient_part` and calls
// `refresh`, on all ranks. Padding is zero throughout.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "fp8/fp8_matrix.h"
#include "shard/unit_layout.h"

namespace rowshard {

class UnitSource;

class TrainablePart {
 public:
  /// `group` is the communicator the vector is cut over; it outlives the part.
  TrainablePart(const std::string& unit, const std::vector<WeightSpec>& weights,
                const TrainableLayout& layout, Communicator& group, Arena& arena);

  const View& masters() const { return masters_.view(); }
  const View& gradient_part() const { return gradient_part_.view(); }
  bool has_gradient() const { return static_cast<bool>(gradient_); }

  /// Reads the masters and makes the stored part of them. Collective.
  void load(UnitSource& source, Stream& stream);
  /// The masters have changed: makes codes and scales, or rounds. Collective; not while gathered.
  void refresh(Stream& stream);
  /// gradient_part = sum over the ranks; the whole gradient is freed. With `replicas`, the ranks
  /// that hold the same part, over them too. A rank without a gradient adds zeros. Collective.
  void reduce_gradient(Communicator* replicas, Stream& stream);

  // -- by the unit
  void gather(Stream& communication);
  void bind();
  void reshard();
  Fp8Matrix& fp8(int place);
  ConstView plain(int place) const;
  View gradient(int place, Stream& stream);

 private:
  /// The elements of a weight in this rank's part: [begin, end) of the weight, `at` in the part.
  struct Run {
    int64_t begin, end, at;
  };
  bool is_fp8() const { return layout_.storage == Storage::kFp8Block; }
  Run run(size_t place) const;
  View amax_of(size_t place) const;

  std::string unit_;
  TrainableLayout layout_;
  std::vector<WeightSpec> specs_;  // by place
  Communicator& group_;
  Arena& arena_;
  Tensor masters_, stored_, gradient_part_;
  Tensor amax_;                       // all blocks of all weights, f32
  std::vector<int64_t> amax_offset_;  // by place
  std::vector<Tensor> scales_;        // GEMM layout, replicated
  std::vector<std::unique_ptr<Fp8Matrix>> matrices_;
  Buffer gathered_;
  Tensor gradient_;
  bool bound_ = false;
  bool changed_ = true;  // since the last bind
};

}  // namespace rowshard
