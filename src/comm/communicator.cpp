#include "comm/communicator.h"

#include <numeric>

#include "comm/host_engine.h"

namespace rowshard {
namespace {

bool reducible(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kF32:
    case DType::kBF16:
    case DType::kF16:
    case DType::kI64:
    case DType::kI32:
      return true;
    default:
      return false;
  }
}

/// The smaller operand is the own slice of the larger one, or they share nothing.
bool in_place_or_apart(const ConstView& large, const ConstView& small, int64_t offset_bytes) {
  if (small.bytes() == 0)
    return true;
  const std::byte* begin = large.byte_data();
  const std::byte* end = begin + large.bytes();
  if (small.byte_data() == begin + offset_bytes)
    return true;
  return small.byte_data() + small.bytes() <= begin || small.byte_data() >= end;
}

}  // namespace

const char* to_string(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return "sum";
    case Reduction::kMax:
      return "max";
    case Reduction::kMin:
      return "min";
  }
  return "?";
}

Communicator::Communicator(std::string name, std::vector<int> members, int rank, Device device)
    : name_(std::move(name)), members_(std::move(members)), rank_(rank), device_(device) {}

std::string Communicator::describe(const char* kind) const {
  return message("rank ", members_[rank_], ": ", kind, " #", issued_, " on \"", name_, "\" (",
                 rank_list(members_), ")");
}

void Communicator::check_operand(const char* kind, const ConstView& view,
                                 const Stream& stream) const {
  ROWSHARD_CHECK(view.device == device_ && stream.device() == device_, ShapeError, describe(kind),
                 ": operand ", rowshard::describe(view), " and stream ", stream.name(), " on ",
                 stream.device(), " must be on ", device_);
}

void Communicator::check_all_gather(const View& out, const ConstView& in, const Stream& stream) {
  ++issued_;
  check_operand("all_gather", in, stream);
  check_operand("all_gather", out, stream);
  ROWSHARD_CHECK(in.dtype == out.dtype && out.elements() == size() * in.elements(), ShapeError,
                 describe("all_gather"), ": ", rowshard::describe(in), " from each of ", size(),
                 " ranks does not make ", rowshard::describe(out));
  ROWSHARD_CHECK(in_place_or_apart(out, in, rank_ * in.bytes()), ShapeError, describe("all_gather"),
                 ": the operand lies inside the result but not at this rank's own slice");
  wire_bytes_ += out.bytes() - in.bytes();
}

void Communicator::all_gather(const View& out, const ConstView& in, Stream& stream) {
  check_all_gather(out, in, stream);
  if (out.elements() > 0)
    start_all_gather(out, in, stream);
}

std::unique_ptr<FixedPart> Communicator::fix(const ConstView& part, std::vector<ByteRange> own) {
  ROWSHARD_CHECK(part.device == device_, ShapeError, describe("fix"), ": ",
                 rowshard::describe(part), " must be on ", device_);
  for (const ByteRange& range : own) {
    ROWSHARD_CHECK(range.begin >= 0 && range.begin <= range.end && range.end <= part.bytes(),
                   ShapeError, describe("fix"), ": bytes ", range.begin, " to ", range.end,
                   " of a part of ", part.bytes());
  }
  return start_fix(part, std::move(own));
}

void Communicator::all_gather(const View& out, const FixedPart& part, Stream& stream) {
  check_all_gather(out, part.part(), stream);
  if (out.elements() > 0)
    start_fixed_all_gather(out, part, stream);
}

void Communicator::all_gather_v(const View& out, const ConstView& in,
                                std::span<const int64_t> counts, Stream& stream) {
  ++issued_;
  check_operand("all_gather_v", in, stream);
  check_operand("all_gather_v", out, stream);
  ROWSHARD_CHECK(static_cast<int>(counts.size()) == size(), ShapeError, describe("all_gather_v"),
                 ": ", counts.size(), " counts for ", size(), " ranks");
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  ROWSHARD_CHECK(in.dtype == out.dtype && out.elements() == total && in.elements() == counts[rank_],
                 ShapeError, describe("all_gather_v"), ": ", rowshard::describe(in), " of ",
                 counts[rank_], " elements and ", rowshard::describe(out), " of ", total);
  const int64_t before =
      std::accumulate(counts.begin(), counts.begin() + rank_, int64_t{0}) * size_of(in.dtype);
  ROWSHARD_CHECK(in_place_or_apart(out, in, before), ShapeError, describe("all_gather_v"),
                 ": the operand lies inside the result but not at this rank's own slice");
  if (total == 0)
    return;
  wire_bytes_ += out.bytes() - in.bytes();
  start_all_gather_v(out, in, counts, stream);
}

void Communicator::reduce_scatter(const View& out, const ConstView& in, Reduction reduction,
                                  Stream& stream) {
  ++issued_;
  check_operand("reduce_scatter", in, stream);
  check_operand("reduce_scatter", out, stream);
  ROWSHARD_CHECK(in.dtype == out.dtype && in.elements() == size() * out.elements(), ShapeError,
                 describe("reduce_scatter"), ": ", rowshard::describe(in), " does not make ",
                 rowshard::describe(out), " on each of ", size(), " ranks");
  ROWSHARD_CHECK(reducible(in.dtype), ShapeError, describe("reduce_scatter"), ": no arithmetic on ",
                 to_string(in.dtype));
  ROWSHARD_CHECK(in_place_or_apart(in, out, rank_ * out.bytes()), ShapeError,
                 describe("reduce_scatter"),
                 ": the result lies inside the operand but not at this rank's own slice");
  if (in.elements() == 0)
    return;
  wire_bytes_ += in.bytes() - out.bytes();
  start_reduce_scatter(out, in, reduction, stream);
}

void Communicator::all_reduce(const View& inout, Reduction reduction, Stream& stream) {
  ++issued_;
  check_operand("all_reduce", inout, stream);
  ROWSHARD_CHECK(reducible(inout.dtype), ShapeError, describe("all_reduce"), ": no arithmetic on ",
                 to_string(inout.dtype));
  if (inout.elements() == 0)
    return;
  wire_bytes_ += 2 * (size() - 1) * inout.bytes() / size();
  start_all_reduce(inout, reduction, stream);
}

void Communicator::broadcast(const View& inout, int root, Stream& stream) {
  ++issued_;
  check_operand("broadcast", inout, stream);
  ROWSHARD_CHECK(root >= 0 && root < size(), ShapeError, describe("broadcast"), ": root ", root,
                 " is not in the group");
  if (inout.elements() == 0)
    return;
  if (rank_ != root)
    wire_bytes_ += inout.bytes();
  start_broadcast(inout, root, stream);
}

void Communicator::exchange(std::span<const ConstView> send, int to, std::span<const View> receive,
                            int from, Stream& stream) {
  ++issued_;
  const auto in_group = [&](int peer) { return peer >= 0 && peer < size(); };
  ROWSHARD_CHECK(in_group(to) && in_group(from) && (to == rank_) == (from == rank_), ShapeError,
                 describe("exchange"), ": to rank ", to, " and from rank ", from,
                 "; both are ranks of the group, and both this rank or neither");
  ROWSHARD_CHECK(send.size() == receive.size(), ShapeError, describe("exchange"), ": ", send.size(),
                 " buffers to send, ", receive.size(), " to receive");
  int64_t received = 0;
  for (const ConstView& view : send)
    check_operand("exchange", view, stream);
  for (const View& view : receive) {
    check_operand("exchange", view, stream);
    received += view.bytes();
  }
  if (to == rank_) {
    for (size_t i = 0; i < send.size(); ++i) {
      if (send[i].data != receive[i].data)
        copy(receive[i], send[i], stream);
    }
    return;
  }
  wire_bytes_ += received;
  start_exchange(send, to, receive, from, stream);
}

void Communicator::barrier() {
  ++issued_;
  start_barrier();
}

}  // namespace rowshard
