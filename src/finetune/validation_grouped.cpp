#include "finetune/validation_grouped.h"

#include "finetune/validation_mixture.h"
#include "layers/expert_parallel.h"
#include "layers/parallel_linear.h"

namespace rowshard {

namespace {

using namespace mixture;

/// Experts over ranks: the bits of one rank that holds them all.
std::string whole_experts(TensorParallel& tp, Base base, std::string& detail) {
  const int ranks = tp.size(), rank = tp.rank();
  Bench bench(tp.group.device(), activation_dtype(tp.group));
  const std::vector<int64_t> counts = row_counts(ranks);
  const int64_t width = 384, total = kShare * ranks;
  const Range ffn{0, width}, own{kShare * rank, kShare * (rank + 1)};

  ExpertPlaces place(counts, kExperts, tp);
  Mlp here(bench, place.first_expert(), place.experts(), ffn, width, base);
  const Tensor x = bench.values(kX, own, kAllHidden, kHidden, 1, bench.dtype);
  const Tensor dy = bench.values(kDy, own, kAllHidden, kHidden, 0.1f, bench.dtype);
  const Tensor y = bench.empty(kShare, kHidden), dx = bench.empty(kShare, kHidden);
  {
    const int64_t rows = place.expert_rows();
    const Tensor ex = bench.empty(rows, kHidden), edy = bench.empty(rows, kHidden),
                 ey = bench.empty(rows, kHidden), edx = bench.empty(rows, kHidden);
    place.to_experts(ex, x, bench.ctx);
    place.to_experts(edy, dy, bench.ctx);
    run_mlp(bench, here, ey, edx, ex, edy, place.rows(), width, place.first_row());
    place.from_experts(y, ey, bench.ctx);
    place.from_experts(dx, edx, bench.ctx);
  }

  // One rank: all rows, expert by expert, within that rank by rank.
  Mlp all(bench, 0, kExperts, ffn, width, base);
  std::vector<int64_t> rows(kExperts), order;  // order: rows of the ranks' tensors
  for (int e = 0; e < kExperts; ++e) {
    for (int r = 0; r < ranks; ++r) {
      int64_t first = kShare * r;
      for (int before = 0; before < e; ++before)
        first += counts[r * kExperts + before];
      for (int64_t i = 0; i < counts[r * kExperts + e]; ++i)
        order.push_back(first + i);
      rows[e] += counts[r * kExperts + e];
    }
  }
  const auto in_order = [&](uint64_t seed, float scale) {
    const Tensor whole = bench.values(seed, {0, total}, kAllHidden, kHidden, scale, bench.dtype);
    Tensor sorted = bench.empty(total, kHidden);
    for (int64_t i = 0; i < total; ++i)
      copy(sorted.view().slice_rows(i, 1), whole.view().slice_rows(order[i], 1), bench.stream);
    bench.stream.synchronize();
    return sorted;
  };
  const Tensor one_x = in_order(kX, 1), one_dy = in_order(kDy, 0.1f);
  const Tensor one_y = bench.empty(total, kHidden), one_dx = bench.empty(total, kHidden);
  run_mlp(bench, all, one_y, one_dx, one_x, one_dy, rows, width, 0);

  int64_t compared = 0;
  const auto differ = [&](const ConstView& a, const ConstView& b) {
    compared += a.bytes();
    return bench.bytes(a) != bench.bytes(b);
  };
  for (int64_t i = 0; i < total; ++i) {
    const int64_t row = order[i] - own.begin;
    if (row < 0 || row >= kShare)
      continue;
    if (differ(y.view().slice_rows(row, 1), one_y.view().slice_rows(i, 1)))
      return message("y of row ", row, " is not one rank's");
    if (differ(dx.view().slice_rows(row, 1), one_dx.view().slice_rows(i, 1)))
      return message("dx of row ", row, " is not one rank's");
  }
  for (const Role role : {kGate, kUp, kDown}) {
    for (int e = 0; e < here.count(); ++e) {
      const Expert& mine = here.expert(role, e);
      const Expert& one = all.expert(role, place.first_expert() + e);
      if (differ(mine.grad_a, one.grad_a) || differ(mine.grad_b, one.grad_b))
        return message(mine.weight.name, ": the adapter's gradients are not one rank's");
      if (mine.gradient && differ(mine.gradient, one.gradient))
        return message(mine.weight.name, ": the weight's gradient is not one rank's");
      if (mine.matrix && mine.matrix->usage().columnwise)
        return message(mine.weight.name, " keeps its columnwise copy");
    }
  }
  detail = message(kExperts, " experts over ", ranks, " ranks, every bit of y, dx and gradients (",
                   compared, " bytes)");
  return "";
}

}  // namespace

void validate_grouped(World& world, const RunCheck& check) {
  const std::unique_ptr<Communicator> group = world.communicator("experts");
  Stream stream(world.device(), "tp");
  TensorParallel tp{*group, stream, true, true, false, {}};
  for (const Base base : {Base::kFrozenFp8, Base::kTrainedFp8, Base::kTrainedPlain}) {
    check(message("whole experts over ranks, ", to_string(base)),
          [&](std::string& detail) { return whole_experts(tp, base, detail); });
  }
  check("experts cut over ranks, frozen FP8 with adapters",
        [&](std::string& detail) { return cut_experts(*group, stream, detail); });
  check("counts that do not fit are refused before any collective", [&](std::string& detail) {
    const int64_t issued = group->issued();
    std::vector<int64_t> counts = row_counts(tp.size());
    counts.back() += 1;
    Bench bench(world.device(), DType::kF32);
    const Tensor x = bench.empty(kShare, kHidden), y = bench.empty(kShare * tp.size(), 128);
    Mlp mlp(bench, 0, kExperts, {0, 128}, 128, Base::kFrozenFp8);
    const std::vector<Linear> experts = mlp.linears(kGate, false, 0, 0);
    const View ys[] = {y};
    try {
      column_parallel_forward(ys, x, experts, nullptr, tp, bench.ctx, counts);
    } catch (const ShapeError& error) {
      detail = error.what();
    }
    try {
      ExpertPlaces(std::span(counts).subspan(1), kExperts, tp);
    } catch (const ShapeError& error) {
      if (!detail.empty() && group->issued() == issued)
        return std::string();
    }
    return std::string("they were taken");
  });
}

}  // namespace rowshard
