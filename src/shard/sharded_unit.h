// A unit's rowwise bytes on this rank, and the unit while it is gathered.
//
// Ownership: the unit owns its shard and its replicated scales for its whole life; the gathered
// buffer exists between `gather` and `reshard`. With one rank the shard is the whole unit, so
// gathering binds it in place: no copy and no transient. `reshard_to_group` leaves a slice of the
// unit behind, larger than the shard, from which the next `gather` comes. A weight that lies in
// this rank's shard as a whole is read there, and not copied into the gathered buffer.
//
// A unit may hold trainable weights beside the frozen ones (shard/trainable_part.h): they are
// gathered and resharded with the unit, from parts that change with every update.
//
// Streams: `gather` queues the all-gather on the communication stream and returns; `finish_gather`
// makes the compute stream wait for it and binds the weights. `reshard` may be called as soon as
// the last work that reads the unit has been queued on the compute stream.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "comm/communicator.h"
#include "core/trace.h"
#include "fp8/fp8_matrix.h"
#include "shard/trainable_part.h"
#include "shard/unit_layout.h"

namespace rowshard {

/// Where frozen bytes come from: files, or a test. Called on each rank for what it owns only.
class UnitSource {
 public:
  virtual ~UnitSource() = default;
  /// Writes bytes [begin, end) of the weight's rowwise copy (codes or plain elements, row-major
  /// [N, K], of its slice) to host memory. For weights quantised on the fly the source must also
  /// remember the scales of the bands it quantised for `scales`. The bytes of an MX weight hold its
  /// scales too.
  virtual void read(const WeightSpec& weight, int64_t begin, int64_t end,
                    std::byte* destination) = 0;
  /// Compact scales, f32 [ceil(N/128), ceil(K/128)] row-major, of a kFp8Block weight. Entries this
  /// rank does not know are 0; the caller takes the largest over the ranks.
  virtual void scales(const WeightSpec& weight, float* destination) = 0;
  /// Elements [begin, end) of a trainable weight, row-major, in full precision.
  virtual void read_masters(const WeightSpec& weight, int64_t begin, int64_t end,
                            float* destination);
};

class ShardedUnit {
 public:
  /// `gather_group` is the communicator the unit is cut over, `regather_group` the smaller one of
  /// reshard_to_group, which divides it; both outlive the unit. Making and destroying a unit is
  /// collective over the gather group.
  ShardedUnit(UnitLayout layout, Communicator& gather_group, Arena& arena,
              Communicator* regather_group = nullptr);

  /// Fills this rank's shard and the scales, and leaves the unit sharded. Collective over the
  /// gather group.
  void load(UnitSource& source, Stream& stream);

  /// Frees the shard: nothing of the unit is left, and it must be loaded before it is gathered.
  /// Collective over the gather group.
  void drop();
  bool loaded() const { return !dropped_; }

  /// The trainable weights, one part for each way they are stored; none in a frozen unit.
  const std::vector<std::unique_ptr<TrainablePart>>& trainable() const { return trainable_; }
  /// The gradient of a trainable weight, f32 of its shape, to be added to; zeros at first.
  View gradient(int weight, Stream& stream);

  const UnitLayout& layout() const { return layout_; }
  const std::string& name() const { return layout_.name(); }

  /// This rank's part, padding included: u8 [shard_bytes].
  ConstView shard() const;

  void gather(Stream& communication);
  bool gathering() const { return arrival_.has_value(); }  // queued, not yet finished
  bool gathered() const { return bound_; }
  bool at_shard() const { return !bound_ && !arrival_ && !slice_; }
  void finish_gather(Stream& compute);
  /// Back to the shard: the gathered buffer goes back to the arena and every copy made from it is
  /// dropped. No-op when not gathered.
  void reshard();
  /// Keeps this rank's slice of the gathered unit, 1/k of it over the regather group of k ranks,
  /// and drops the rest.
  void reshard_to_group(Stream& compute);
  /// Frees every columnwise copy that can be made again: nothing before training will read it.
  void drop_columnwise();

  /// The weight while gathered; UsageError otherwise.
  Fp8Matrix& fp8(int weight);
  ConstView plain(int weight) const;

 private:
  void allocate();
  /// A slice for the smaller group is cut out of the gathered buffer, which must then be whole.
  bool slices() const { return regather_group_ && layout_.ranks() > 1; }
  void bind();
  void unbind();
  /// Where the weight lies while gathered.
  std::byte* place(size_t weight) const;

  UnitLayout layout_;
  Communicator& gather_group_;
  Communicator* regather_group_;
  Arena& arena_;
  Buffer shard_;
  std::unique_ptr<FixedPart> fixed_;  // the shard, for the gather group
  Buffer slice_;                      // over the regather group, between forward and backward
  Buffer gathered_;
  std::optional<Event> arrival_;
  TraceSpan gather_span_;  // host: until the gather has arrived
  bool dropped_ = false;
  bool bound_ = false;
  bool bound_before_ = false;      // since the last load
  std::vector<int64_t> in_shard_;  // by weight: its first byte in the shard, or -1: not as a whole
  std::vector<std::unique_ptr<TrainablePart>> trainable_;
  std::vector<std::pair<int, int>> home_;             // weight -> part and place in it, or -1
  std::vector<std::unique_ptr<Fp8Matrix>> matrices_;  // null for plain and for trainable weights
  std::vector<Tensor> scales_;                        // GEMM layout, replicated
};

}  // namespace rowshard
