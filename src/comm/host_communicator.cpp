// Direct exchange between all pairs of ranks: each rank sends its part to every other. It receives
// as many bytes as a ring would, and what a late operation waits for is exactly the rank that is
// late.
#include <cstring>
#include <memory>

#include "comm/backends.h"
#include "comm/host_engine.h"

namespace rowshard {
namespace {

constexpr const char* kComputeStream = "compute";
constexpr int64_t kBlock = 1024;  // elements summed at a time, so that partial sums stay in cache

template <typename T>
using Sum = std::conditional_t<std::is_integral_v<T>, T, Accumulator<T>>;

template <typename A>
A combine(A a, A b, Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return a + b;
    case Reduction::kMax:  // a NaN on any rank stays
      return a > b || a != a ? a : b;
    case Reduction::kMin:
      return a < b || a != a ? a : b;
  }
  return a;
}

/// to = parts[0] op parts[1] op …, in that order; `to` may be one of the parts.
template <typename T>
void reduce_typed(std::byte* to, const std::vector<const std::byte*>& parts, int64_t elements,
                  Reduction reduction) {
  Sum<T> sums[kBlock];
  for (int64_t begin = 0; begin < elements; begin += kBlock) {
    const int64_t count = std::min(kBlock, elements - begin);
    const auto part = [&](size_t i) { return reinterpret_cast<const T*>(parts[i]) + begin; };
    for (int64_t i = 0; i < count; ++i)
      sums[i] = static_cast<Sum<T>>(part(0)[i]);
    for (size_t r = 1; r < parts.size(); ++r) {
      const T* values = part(r);
      for (int64_t i = 0; i < count; ++i) {
        sums[i] = combine(sums[i], static_cast<Sum<T>>(values[i]), reduction);
      }
    }
    T* out = reinterpret_cast<T*>(to) + begin;
    for (int64_t i = 0; i < count; ++i)
      out[i] = static_cast<T>(sums[i]);
  }
}

void reduce_parts(std::byte* to, const std::vector<const std::byte*>& parts, int64_t elements,
                  DType dtype, Reduction reduction) {
  switch (dtype) {
    case DType::kF64:
      return reduce_typed<double>(to, parts, elements, reduction);
    case DType::kF32:
      return reduce_typed<float>(to, parts, elements, reduction);
    case DType::kBF16:
      return reduce_typed<bf16>(to, parts, elements, reduction);
    case DType::kF16:
      return reduce_typed<f16>(to, parts, elements, reduction);
    case DType::kI64:
      return reduce_typed<int64_t>(to, parts, elements, reduction);
    case DType::kI32:
      return reduce_typed<int32_t>(to, parts, elements, reduction);
    default:
      throw LogicError(message("no arithmetic on ", to_string(dtype)));
  }
}

/// All other ranks of the group, each rank starting with its neighbour so that not all of them
/// write to rank 0 first.
template <typename F>
void for_each_peer(int rank, int size, F&& call) {
  for (int step = 1; step < size; ++step)
    call((rank + step) % size);
}

class HostCommunicator : public Communicator {
 public:
  HostCommunicator(const Group& group, HostEngine& engine)
      : Communicator(group.name, group.members, group.rank, kHost),
        engine_(engine),
        channel_(group.channel) {}

 private:
  using Operation = std::shared_ptr<HostOperation>;

  Operation begin(const char* kind) const {
    return std::make_shared<HostOperation>(engine_, channel_, issued(), describe(kind));
  }
  Operation begin(const char* kind, Stream& stream) const {
    stream.synchronize();  // stream order: what is pending there comes first
    return begin(kind);
  }
  void launch(Operation operation, Stream& stream) {
    engine_.start(operation);
    if (stream.name() == kComputeStream) {
      operation->finish();
    } else {
      stream.add_pending(std::move(operation));
    }
  }
  template <typename F>
  void for_each_peer(F&& call) const {
    rowshard::for_each_peer(rank(), size(), call);
  }

  void start_all_gather(const View& out, const ConstView& in, Stream& stream) override {
    const std::vector<int64_t> counts(size(), in.elements());
    gather("all_gather", out, in, counts, {{0, in.bytes()}}, stream);
  }
  void start_fixed_all_gather(const View& out, const FixedPart& part, Stream& stream) override {
    const std::vector<int64_t> counts(size(), part.part().elements());
    gather("all_gather", out, part.part(), counts, part.own(), stream);
  }
  void start_all_gather_v(const View& out, const ConstView& in, std::span<const int64_t> counts,
                          Stream& stream) override {
    gather("all_gather_v", out, in, counts, {{0, in.bytes()}}, stream);
  }
  void gather(const char* kind, const View& out, const ConstView& in,
              std::span<const int64_t> counts, std::vector<ByteRange> own_bytes, Stream& stream) {
    Operation operation = begin(kind, stream);
    std::vector<int64_t> offsets(size() + 1, 0);  // bytes
    for (int r = 0; r < size(); ++r)
      offsets[r + 1] = offsets[r] + counts[r] * size_of(in.dtype);
    for_each_peer([&](int peer) {
      operation->send(members()[peer], in.byte_data(), in.bytes());
      operation->receive(members()[peer], out.byte_data() + offsets[peer],
                         offsets[peer + 1] - offsets[peer]);
    });
    std::byte* own = out.byte_data() + offsets[rank()];
    operation->then([own, in, own_bytes = std::move(own_bytes)] {
      for (const auto& [first, last] : own_bytes) {
        if (own != in.data && last > first)
          std::memmove(own + first, in.byte_data() + first, last - first);
      }
    });
    launch(operation, stream);
  }

  /// Slice r of every rank's `in` goes to rank r, which reduces them in rank order into `out`.
  void scatter_sum(HostOperation& operation, std::byte* out, const std::byte* in,
                   const std::vector<int64_t>& offsets, DType dtype, Reduction reduction) {
    const int64_t width = size_of(dtype);
    const int64_t own = offsets[rank() + 1] - offsets[rank()];
    std::shared_ptr<std::byte[]> scratch(new std::byte[(size() - 1) * own * width]);
    std::vector<const std::byte*> parts(size());
    parts[rank()] = in + offsets[rank()] * width;
    std::byte* next = scratch.get();
    for_each_peer([&](int peer) {
      operation.send(members()[peer], in + offsets[peer] * width,
                     (offsets[peer + 1] - offsets[peer]) * width);
      operation.receive(members()[peer], next, own * width);
      parts[peer] = next;
      next += own * width;
    });
    operation.then([=, parts = std::move(parts), scratch = std::move(scratch)] {
      reduce_parts(out, parts, own, dtype, reduction);
    });
  }

  void start_reduce_scatter(const View& out, const ConstView& in, Reduction reduction,
                            Stream& stream) override {
    Operation operation = begin("reduce_scatter", stream);
    std::vector<int64_t> offsets(size() + 1);
    for (int r = 0; r <= size(); ++r)
      offsets[r] = r * out.elements();
    scatter_sum(*operation, out.byte_data(), in.byte_data(), offsets, in.dtype, reduction);
    launch(operation, stream);
  }

  void start_all_reduce(const View& inout, Reduction reduction, Stream& stream) override {
    Operation operation = begin("all_reduce", stream);
    const int64_t width = size_of(inout.dtype);
    const int64_t slice = ceil_div(inout.elements(), size());
    std::vector<int64_t> offsets(size() + 1);
    for (int r = 0; r <= size(); ++r)
      offsets[r] = std::min(r * slice, inout.elements());
    std::byte* data = inout.byte_data();
    std::byte* own = data + offsets[rank()] * width;
    scatter_sum(*operation, own, data, offsets, inout.dtype, reduction);
    HostOperation* op = operation.get();  // the step is the operation's own: no cycle
    operation->then([=, rank = rank(), members = members()] {
      rowshard::for_each_peer(rank, static_cast<int>(members.size()), [&](int peer) {
        op->send(members[peer], own, (offsets[rank + 1] - offsets[rank]) * width);
        op->receive(members[peer], data + offsets[peer] * width,
                    (offsets[peer + 1] - offsets[peer]) * width);
      });
    });
    launch(operation, stream);
  }

  void start_broadcast(const View& inout, int root, Stream& stream) override {
    Operation operation = begin("broadcast", stream);
    if (rank() == root) {
      for_each_peer(
          [&](int peer) { operation->send(members()[peer], inout.byte_data(), inout.bytes()); });
    } else {
      operation->receive(members()[root], inout.byte_data(), inout.bytes());
    }
    launch(operation, stream);
  }

  void start_exchange(std::span<const ConstView> send, int to, std::span<const View> receive,
                      int from, Stream& stream) override {
    Operation operation = begin("exchange", stream);
    for (const ConstView& view : send)
      operation->send(members()[to], view.byte_data(), view.bytes());
    for (const View& view : receive)
      operation->receive(members()[from], view.byte_data(), view.bytes());
    launch(operation, stream);
  }

  void start_barrier() override {
    Operation operation = begin("barrier");
    auto tokens = std::make_shared<std::vector<std::byte>>(size());
    for_each_peer([&](int peer) {
      operation->send(members()[peer], tokens->data() + rank(), 1);
      operation->receive(members()[peer], tokens->data() + peer, 1);
    });
    operation->then([tokens] {});  // keeps them as long as the messages
    engine_.start(operation);
    operation->finish();
  }

  HostEngine& engine_;
  int channel_;
};

}  // namespace

std::unique_ptr<Communicator> make_host_communicator(const Group& group, HostEngine& engine) {
  return std::make_unique<HostCommunicator>(group, engine);
}

}  // namespace rowshard
