// Reads a rank's own bytes of a checkpoint into its shards.
//
// A weight that the checkpoint holds as the unit stores it is read range by range. A bf16, fp16 or
// fp32 linear weight under the block recipe is read in bands of 128 rows, because a scale belongs
// to a whole 128x128 block; the band is quantised on the host and only the owned bytes are kept.
// Every rank that owns bytes of a band computes the same codes and scales. MX weights are quantised
// whole, because a group of the columnwise copy runs over 32 rows. A weight that is a slice (tensor
// parallelism) is read from where it lies: rows as one range, columns row by row.
#pragma once

#include <map>

#include "core/arena.h"
#include "model/checkpoint.h"
#include "shard/sharded_unit.h"

namespace rowshard {

/// The bytes of an MX weight, codes, zeros and scales of the copy that the spec names, from the
/// values [N, K] f32.
std::vector<std::byte> quantize_mx(const WeightSpec& weight, const std::vector<float>& values);

class CheckpointSource : public UnitSource {
 public:
  explicit CheckpointSource(const Checkpoint& checkpoint);

  void read(const WeightSpec& weight, int64_t begin, int64_t end, std::byte* destination) override;
  void scales(const WeightSpec& weight, float* destination) override;

 private:
  /// The file's bytes, of the weight's slice.
  void read_stored(const WeightSpec& weight, const std::string& name, int64_t begin, int64_t end,
                   std::byte* destination);
  void read_plain(const WeightSpec& weight, const std::string& name, int64_t begin, int64_t end,
                  std::byte* destination);
  void read_mx(const WeightSpec& weight, const std::string& name, int64_t begin, int64_t end,
               std::byte* destination);
  void quantize_bands(const WeightSpec& weight, const std::string& name, int64_t begin, int64_t end,
                      std::byte* destination);

  const Checkpoint& checkpoint_;
  Arena arena_{kHost};
  Stream stream_{kHost};
  std::map<std::string, std::vector<float>> quantized_scales_;  // compact, 0 where not owned
};

}  // namespace rowshard
