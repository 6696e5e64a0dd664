// A communicator of the plan device: a group of any size in one process, whose collectives check
// their operands, count their bytes, and move nothing.
#pragma once

#include "comm/communicator.h"

namespace rowshard {

class PlanCommunicator : public Communicator {
 public:
  PlanCommunicator(std::string name, int size, int rank, Device device);

 private:
  void start_all_gather(const View&, const ConstView&, Stream&) override {}
  void start_all_gather_v(const View&, const ConstView&, std::span<const int64_t>,
                          Stream&) override {}
  void start_reduce_scatter(const View&, const ConstView&, Reduction, Stream&) override {}
  void start_all_reduce(const View&, Reduction, Stream&) override {}
  void start_broadcast(const View&, int, Stream&) override {}
  void start_exchange(std::span<const ConstView>, int, std::span<const View>, int,
                      Stream&) override {}
  void start_barrier() override {}
};

}  // namespace rowshard
