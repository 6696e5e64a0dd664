#include "comm/plan_communicator.h"

#include <numeric>

namespace rowshard {

namespace {

std::vector<int> first_ranks(int size) {
  std::vector<int> members(size);
  std::iota(members.begin(), members.end(), 0);
  return members;
}

}  // namespace

PlanCommunicator::PlanCommunicator(std::string name, int size, int rank, Device device)
    : Communicator(std::move(name), first_ranks(size), rank, device) {}

}  // namespace rowshard
