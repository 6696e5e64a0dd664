#include "layers/expert_parallel.h"

#include <algorithm>

namespace rowshard {

ExpertPlaces::ExpertPlaces(std::span<const int64_t> counts, int experts, TensorParallel& tp)
    : tp_(tp), counts_(counts.begin(), counts.end()), experts_(experts) {
  const int ranks = tp.size();
  const bool fit = experts > 0 && std::ssize(counts_) == int64_t{ranks} * experts &&
                   std::ranges::all_of(counts_, [](int64_t count) { return count >= 0; });
  ROWSHARD_CHECK(fit, ShapeError, counts_.size(), " row counts for ", experts, " experts on ",
                 ranks, " ranks; wanted one for each of both, none below 0");
  rows_.resize(this->experts());
  for (int rank = 0; rank < ranks; ++rank) {
    most_experts_ = std::max(most_experts_, first(rank + 1) - first(rank));
    for (int expert = 0; expert < experts; ++expert) {
      const int64_t count = counts_[rank * experts + expert];
      own_rows_ += rank == tp.rank() ? count : 0;
      first_row_ += expert < first_expert() ? count : 0;
      if (expert >= first_expert() && expert < first(tp.rank() + 1)) {
        rows_[expert - first_expert()] += count;
        expert_rows_ += count;
      }
    }
  }
}

template <typename V>
std::vector<V> ExpertPlaces::own_slices(const V& own, int source, int holder) const {
  std::vector<V> slices;
  int64_t row = 0;
  for (int expert = 0; expert < first(holder + 1); ++expert) {
    const int64_t count = counts_[source * experts_ + expert];
    if (expert >= first(holder))
      slices.push_back(own.slice_rows(row, count));
    row += count;
  }
  slices.resize(most_experts_, own.slice_rows(0, 0));
  return slices;
}

template <typename V>
std::vector<V> ExpertPlaces::expert_slices(const V& at_experts, int source, int holder) const {
  std::vector<V> slices;
  int64_t row = 0;
  for (int expert = first(holder); expert < first(holder + 1); ++expert) {
    for (int rank = 0; rank < tp_.size(); ++rank) {
      const int64_t count = counts_[rank * experts_ + expert];
      if (rank == source)
        slices.push_back(at_experts.slice_rows(row, count));
      row += count;
    }
  }
  slices.resize(most_experts_, at_experts.slice_rows(0, 0));
  return slices;
}

void ExpertPlaces::check(const char* operation, const ConstView& own,
                         const ConstView& at_experts) const {
  const bool fit = own.shape.rank() == 2 && at_experts.shape.rank() == 2 &&
                   own.dim(0) == own_rows_ && at_experts.dim(0) == expert_rows_ &&
                   own.dim(1) == at_experts.dim(1) && own.dtype == at_experts.dtype;
  ROWSHARD_CHECK(fit, ShapeError, operation, ": own rows ", describe(own), ", at the experts ",
                 describe(at_experts), "; wanted ", own_rows_, " and ", expert_rows_,
                 " rows of one width and dtype");
}

/// One exchange a distance; this rank's own rows are copied while the others travel.
void ExpertPlaces::travel(const Slices& send, const Places& receive, Context& ctx) {
  const int rank = tp_.rank(), size = tp_.size();
  Event ready(ctx.device());
  ready.record(ctx.stream);
  tp_.stream.wait(ready);
  std::vector<Event> arrivals;
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size, from = (rank - step + size) % size;
    tp_.group.exchange(send(to), to, receive(from), from, tp_.stream);
    arrivals.emplace_back(ctx.device());
    arrivals.back().record(tp_.stream);
  }
  tp_.group.exchange(send(rank), rank, receive(rank), rank, ctx.stream);
  for (const Event& arrival : arrivals)
    tp_.waits.wait(ctx.stream, arrival);
}

void ExpertPlaces::to_experts(const View& at_experts, const ConstView& own, Context& ctx) {
  check("to_experts", own, at_experts);
  travel([&](int to) { return own_slices(own, tp_.rank(), to); },
         [&](int from) { return expert_slices(at_experts, from, tp_.rank()); }, ctx);
}

void ExpertPlaces::from_experts(const View& own, const ConstView& at_experts, Context& ctx) {
  check("from_experts", own, at_experts);
  travel([&](int to) { return expert_slices(at_experts, to, tp_.rank()); },
         [&](int from) { return own_slices(own, tp_.rank(), from); }, ctx);
}

}  // namespace rowshard
