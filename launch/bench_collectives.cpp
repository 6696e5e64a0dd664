#include "bench_collectives.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/arena.h"
#include "failure.h"

namespace rowshard {

namespace {

constexpr int kWarmUp = 3;

// Element i of rank r: small whole numbers, so that sums over ranks are exact in f32, and with no
// short period, so that a shifted or swapped part shows.
float element(int rank, int64_t i) {
  const uint64_t mixed =
      (static_cast<uint64_t>(i) + 1) * 0x9E3779B97F4A7C15ull + rank * 0x632BE5Bull;
  return static_cast<float>(mixed >> 54);  // 0 … 1023
}

struct Case {
  std::string name;
  View in, out;  // f32
  std::function<void()> run;
  std::function<float(int64_t index)> expected;  // of `out`
  double bus_factor;                             // bytes on the busiest link / bytes
};

class Bench {
 public:
  Bench(World& world, const CollectiveBenchOptions& options)
      : world_(world),
        options_(options),
        arena_(world.device()),
        stream_(world.device()),
        group_(world.communicator("bench")),
        control_(world.host_communicator("bench control", group_->members())) {}

  CollectiveResult measure(const Case& c) {
    fill(c.in);
    fill_bytes_unless_shared(c);
    c.run();
    stream_.synchronize();
    check(c);
    for (int i = 0; i < kWarmUp; ++i)
      c.run();
    std::vector<double> times;
    for (int i = 0; i < options_.repeats; ++i) {
      Event begin(world_.device(), true), end(world_.device(), true);
      group_->barrier();
      begin.record(stream_);
      c.run();
      end.record(stream_);
      times.push_back(slowest(elapsed_ms(begin, end)));
    }
    std::ranges::sort(times);
    const double ms = times[times.size() / 2];
    const int64_t bytes = std::max(c.in.bytes(), c.out.bytes());
    return {c.name, bytes, ms, static_cast<double>(bytes) * c.bus_factor / (ms * 1e6)};
  }

  std::vector<CollectiveResult> run() {
    const int n = world_.size(), rank = world_.rank();
    const int64_t part = options_.mebibytes * (1 << 20) / 4 / n;
    ROWSHARD_CHECK(part > 0, ConfigError, "--mib is too small for ", n, " ranks");
    const int64_t whole = part * n;
    Tensor small = arena_.tensor(Category::kCommunication, "part", DType::kF32, {part});
    Tensor large = arena_.tensor(Category::kCommunication, "whole", DType::kF32, {whole});
    const auto sum = [n](int64_t i) {
      float total = 0;
      for (int r = 0; r < n; ++r)
        total += element(r, i);
      return total;
    };
    const double share = static_cast<double>(n - 1) / n;
    std::vector<CollectiveResult> results;
    results.push_back(measure(
        {"all_gather", small, large, [&] { group_->all_gather(large, small, stream_); },
         [part](int64_t i) { return element(static_cast<int>(i / part), i % part); }, share}));
    results.push_back(
        measure({"reduce_scatter", large, small,
                 [&] { group_->reduce_scatter(small, large, Reduction::kSum, stream_); },
                 [&, rank](int64_t i) { return sum(rank * part + i); }, share}));
    // The maximum: in place, repeats leave it as it is, where a sum would grow out of range.
    results.push_back(measure({"all_reduce", large, large,
                               [&] { group_->all_reduce(large, Reduction::kMax, stream_); },
                               [n](int64_t i) {
                                 float most = 0;
                                 for (int r = 0; r < n; ++r)
                                   most = std::max(most, element(r, i));
                                 return most;
                               },
                               2 * share}));
    results.push_back(
        measure({"broadcast", large, large, [&] { group_->broadcast(large, 0, stream_); },
                 [](int64_t i) { return element(0, i); }, 1.0}));
    return results;
  }

 private:
  void fill(const View& view) {
    std::vector<float> values(view.elements());
    for (int64_t i = 0; i < view.elements(); ++i)
      values[i] = element(world_.rank(), i);
    copy(view, ConstView(values.data(), DType::kF32, view.shape, kHost), stream_);
    stream_.synchronize();
  }

  void fill_bytes_unless_shared(const Case& c) {
    if (c.out.data != c.in.data)
      fill_bytes(c.out, 0xff, stream_);
  }

  void check(const Case& c) {
    std::vector<float> values(c.out.elements());
    copy(View(values.data(), DType::kF32, c.out.shape, kHost), c.out, stream_);
    stream_.synchronize();
    for (int64_t i = 0; i < c.out.elements(); ++i) {
      const float wanted = c.expected(i);
      ROWSHARD_CHECK(values[i] == wanted, Error, c.name, " gave ", values[i], " at element ", i,
                     " of ", c.out.elements(), " instead of ", wanted);
    }
  }

  double slowest(double milliseconds) {
    Stream stream(kHost);
    control_->all_reduce(View(&milliseconds, DType::kF64, {1}, kHost), Reduction::kMax, stream);
    stream.synchronize();
    return milliseconds;
  }

  World& world_;
  CollectiveBenchOptions options_;
  Arena arena_;
  Stream stream_;
  std::unique_ptr<Communicator> group_;
  std::unique_ptr<Communicator> control_;
};

}  // namespace

std::vector<CollectiveResult> bench_collectives(World& world,
                                                const CollectiveBenchOptions& options) {
  if (world.size() < 2) {
    throw Skip("bench collectives needs at least 2 ranks; start it with mpirun -np 2 or torchrun");
  }
  return Bench(world, options).run();
}

}  // namespace rowshard
