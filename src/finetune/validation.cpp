#include "finetune/validation.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "comm/host_engine.h"
#include "finetune/memory_plan.h"
#include "finetune/synthetic_run.h"
#include "finetune/validation_grouped.h"

namespace rowshard {

namespace {

using Mode = ReshardAfterForward::Mode;

constexpr int kSteps = 3;  // recorded ones: one queued, one recorded, one replayed alone
constexpr double kLr = 2e-4;

constexpr std::pair<ValidationMode, const char*> kModes[] = {
    {ValidationMode::kSingle, "single"},        {ValidationMode::kFsdp2Reshard, "fsdp2-reshard"},
    {ValidationMode::kFsdp2Keep, "fsdp2-keep"}, {ValidationMode::kHsdp, "hsdp"},
    {ValidationMode::kTpSp, "tp-sp"},           {ValidationMode::kFsdp2Tp, "fsdp2-tp"},
    {ValidationMode::kGrouped, "grouped"},      {ValidationMode::kMxfp8, "mxfp8"}};

/// Sizes that no rank count divides, and that FP8 tensor cores take.
SyntheticOptions small_model(const World& world) {
  SyntheticOptions options;
  ModelConfig& model = options.model;
  model.hidden_size = 192;
  model.intermediate_size = 320;
  model.layers = 3;
  model.heads = 3;
  model.kv_heads = 1;
  model.head_dim = 64;
  model.rms_norm_eps = 1e-5;
  model.vocab_size = 264;
  options.lora.r = 8;
  options.tokens = 48;
  model.max_position_embeddings = options.tokens;
  options.execution.dp_shard = world.size();
  options.execution.device = world.device().is_cuda() ? DeviceChoice::kCuda : DeviceChoice::kHost;
  options.execution.transport = world.transport();
  return options;
}

/// The same for tensor parallelism: parts that are whole blocks, heads that divide, FFN blocks that
/// do not.
SyntheticOptions splittable_model(const World& world, int tp) {
  SyntheticOptions options = small_model(world);
  ModelConfig& model = options.model;
  model.hidden_size = 256;
  model.intermediate_size = 128 * (2 * tp + 1);
  model.layers = 2;
  model.heads = 2 * tp;
  model.kv_heads = tp;
  model.head_dim = 128;
  options.tokens = 16 * tp;
  model.max_position_embeddings = options.tokens;
  options.execution.tp = tp;
  options.execution.dp_shard = world.size() / tp;
  return options;
}

/// What a run leaves; the same bits or not.
struct Outcome {
  std::vector<SyntheticRun::Step> steps;
  std::vector<float> parameters;

  std::string difference(const Outcome& other) const {
    for (size_t i = 0; i < steps.size(); ++i) {
      if (!(steps[i] == other.steps[i])) {
        return message("step ", i + 1, ": loss ", steps[i].loss, " and ", other.steps[i].loss,
                       ", gradient norm ", steps[i].grad_norm, " and ", other.steps[i].grad_norm);
      }
    }
    // Padding depends on the rank count; it is zero.
    const size_t count = std::min(parameters.size(), other.parameters.size());
    for (size_t i = 0; i < count; ++i) {
      if (std::memcmp(&parameters[i], &other.parameters[i], sizeof(float)) != 0)
        return message("parameter ", i, ": ", parameters[i], " and ", other.parameters[i]);
    }
    return "";
  }
};

std::string describe(const SyntheticOptions& o) {
  return message(
      "reshard ", to_string(o.execution.reshard_after_forward), " prefetch ", o.execution.prefetch,
      " columnwise ", to_string(o.execution.columnwise), " recompute ", to_string(o.recompute),
      o.grad_accum == 1 ? "" : message(" micro-batches ", o.grad_accum),
      o.execution.keep_over_accumulation ? " kept over them" : "",
      o.execution.tp == 1
          ? ""
          : message(" tp ", o.execution.tp, o.execution.sequence_parallel ? " sequence" : "",
                    o.execution.tp_overlap ? "" : " without overlap"),
      o.cuda_graph ? " recorded" : "");
}

class Validation {
 public:
  explicit Validation(World& world) : world_(world) {}

  /// `check` returns what is wrong on this rank, or nothing; `detail` is read after it.
  void check(const std::string& name, const std::function<std::string(std::string& detail)>& run) {
    std::string detail, wrong;
    wrong = run(detail);
    ValidationCheck result{name, true, detail};
    const std::vector<std::string> all = world_.bootstrap().all_gather(wrong);
    for (int rank = 0; rank < world_.size() && result.ok; ++rank) {
      if (all[rank].empty())
        continue;
      result.ok = false;
      result.detail = message("rank ", rank, ": ", all[rank]);
    }
    report_.checks.push_back(std::move(result));
  }

  Outcome train(SyntheticRun& run, int steps = kSteps) {
    Outcome outcome;
    for (int i = 0; i < steps; ++i)
      outcome.steps.push_back(run.step(kLr, i + 1 < steps ? Follows::kStep : Follows::kNothing));
    outcome.parameters = run.parameters();
    return outcome;
  }
  Outcome train(const SyntheticOptions& options) {
    SyntheticRun run(world_, options);
    return train(run);
  }

  /// All variants give the bits of the first.
  void same_bits(const std::string& name, const std::vector<SyntheticOptions>& variants) {
    check(name, [&](std::string& detail) -> std::string {
      const Outcome first = train(variants[0]);
      for (size_t i = 1; i < variants.size(); ++i) {
        const std::string difference = first.difference(train(variants[i]));
        if (!difference.empty())
          return message(describe(variants[i]), ": ", difference);
      }
      detail = message(variants.size(), " variants, ", kSteps,
                       " steps, every bit of losses, norms ", "and parameters");
      return "";
    });
  }

  /// The same batches on one rank. Sums over ranks have another order, and an FP8 code may round to
  /// the other side of a tie.
  void near_one_rank(const SyntheticOptions& options) {
    check("the curve of one rank", [&](std::string& detail) -> std::string {
      const Outcome many = train(options);
      if (world_.rank() != 0)
        return "";
      SyntheticOptions alone = options;
      alone.execution.dp_shard = 1;
      alone.execution.dp_replicate = 1;
      alone.execution.reshard_after_forward = {Mode::kTrue};
      alone.execution.tp = 1;
      alone.grad_accum = options.grad_accum * world_.size() / options.execution.tp;
      LaunchEnvironment launch;
      launch.local_rank = world_.launch().local_rank;
      const auto world = World::create(launch, world_.device().kind, world_.transport());
      SyntheticRun run(*world, alone);
      const Outcome one = train(run);
      double first = 0, worst = 0;
      for (int i = 0; i < kSteps; ++i) {
        const double apart =
            std::abs(many.steps[i].loss - one.steps[i].loss) / std::abs(one.steps[i].loss);
        worst = std::max(worst, apart);
        if (i == 0)
          first = apart;
      }
      // Partial products of tensor parallelism are rounded to T before they are added up.
      const bool cuda = world_.device().is_cuda(), split = options.execution.tp > 1;
      const double bound = split ? (cuda ? 2e-3 : 1e-4) : cuda ? 1e-4 : 1e-6;
      const double curve_bound = split && cuda ? 5e-3 : 2e-3;
      detail = message("losses differ by ", first, " in the first step, ", worst, " at most");
      if (first > bound || worst > curve_bound)
        return message(detail, "; bounds ", bound, " and ", curve_bound);
      return "";
    });
  }

  void bytes_as_planned(const SyntheticOptions& options) {
    check(
        message("bytes as planned, ", describe(options)), [&](std::string& detail) -> std::string {
          const MemoryPlan plan =
              plan_memory(options.model, plan_options(options), world_.device().kind);
          SyntheticRun run(world_, options);
          run.job().arena().reset_peak();
          run.step(kLr, Follows::kStep);
          const int64_t before = run.job().wire_bytes();
          run.step(kLr, Follows::kStep);  // as most: between others
          const int64_t wire = run.job().wire_bytes() - before;
          run.step(kLr);
          const Arena& arena = run.job().arena();
          const bool resident = options.execution.reshard_after_forward.mode == Mode::kResident;
          for (const Category category :
               {Category::kRowwiseShard, Category::kGathered, Category::kColumnwise,
                Category::kScales, Category::kAdapter, Category::kOptimizer}) {
            const CategoryPlan& planned = plan.categories[static_cast<int>(category)];
            const CategoryBytes found = arena.bytes(category);
            if (run.job().model().slice().rank > 0 && found.peak <= planned.peak)
              continue;
            if (found.now != planned.steady || found.peak != planned.peak) {
              return message(to_string(category), ": planned ", planned.steady, " (peak ",
                             planned.peak, "), found ", found.now, " (peak ", found.peak, ")");
            }
          }
          // With tensor parallelism, of the first rank, which has what does not divide and, of the
          // reduced gradient, the factors that every rank holds.
          if (wire != plan.wire_bytes && (options.execution.tp == 1 || world_.rank() == 0))
            return message("received ", wire, " bytes in a step, planned ", plan.wire_bytes);
          const CategoryBytes gathered = arena.bytes(Category::kGathered);
          if (!resident && gathered.now != 0)
            return message(gathered.now, " bytes still gathered after backward");
          std::vector<int64_t> sizes;
          for (const UnitLayout& unit : plan.units)
            sizes.push_back(unit.ranks() > 1 ? unit.gathered_bytes() : 0);
          std::ranges::sort(sizes, std::greater<>());
          int64_t bound = 0;
          for (int i = 0; i <= options.execution.prefetch && i < static_cast<int>(sizes.size());
               ++i)
            bound += sizes[i];
          if (options.execution.reshard_after_forward.mode == Mode::kTrue && gathered.peak > bound)
            return message("peak of gathered units ", gathered.peak, " above ", bound);
          detail = message("shard ", arena.bytes(Category::kRowwiseShard).now, ", gathered peak ",
                           gathered.peak, ", columnwise peak ",
                           arena.bytes(Category::kColumnwise).peak, ", on the wire ", wire);
          return "";
        });
  }

  void other_phases(const SyntheticOptions& options) {
    check(message("validation, inference and a failed step in between, ", describe(options)),
          [&](std::string& detail) -> std::string {
            const Outcome undisturbed = train(options);
            SyntheticRun run(world_, options);
            Outcome outcome;
            std::vector<double> losses;
            for (int i = 0; i < kSteps; ++i) {
              losses.push_back(run.evaluate());
              run.interrupted_step();
              run.logits();
              if (run.job().arena().bytes(Category::kGathered).now != 0 &&
                  options.execution.reshard_after_forward.mode != Mode::kResident) {
                return "units left gathered";
              }
              // Another step is announced, and does not come at once.
              outcome.steps.push_back(run.step(kLr, Follows::kStep));
            }
            outcome.parameters = run.parameters();
            // Before its update, a step's loss is the validation's of the same batches.
            for (int i = 0; i < kSteps; ++i) {
              const double apart = std::abs(losses[i] - outcome.steps[i].loss) / losses[i];
              if (apart > 1e-6)
                return message("validation says ", losses[i], ", the step ", outcome.steps[i].loss);
            }
            detail = "no bit changed, nothing left over";
            return outcome.difference(undisturbed);
          });
  }

  void training_after_inference_needs_a_source(const SyntheticOptions& options) {
    check("training after inference without a source is refused at the transition",
          [&](std::string& detail) -> std::string {
            SyntheticRun run(world_, options);
            run.job().model().set_source(nullptr);
            run.step(kLr);
            run.evaluate();
            run.step(kLr);  // validation has dropped nothing
            run.logits();
            const int64_t issued = run.job().gather_group().issued();
            try {
              run.step(kLr);
            } catch (const UsageError& error) {
              for (const std::string& other : world_.bootstrap().all_gather(error.what())) {
                if (other != error.what())
                  return message("ranks say \"", error.what(), "\" and \"", other, "\"");
              }
              detail = error.what();
              return run.job().gather_group().issued() == issued ? "" : "after a collective";
            }
            return "training began without its columnwise copies";
          });
  }

  void options_that_differ(const SyntheticOptions& options) {
    check("ranks with other options are named", [&](std::string& detail) -> std::string {
      SyntheticOptions own = options;
      const int odd = world_.size() - 1;
      if (world_.rank() == odd)
        own.lora.r = 16;
      try {
        SyntheticRun run(world_, own);
      } catch (const ConfigError& error) {
        const std::string wanted = message("rank ", odd, " has");
        detail = "before the first collective, on every rank";
        return std::string(error.what()).find(wanted) == std::string::npos ? error.what() : "";
      }
      return "a job started";
    });
  }

  ValidationReport& report() { return report_; }

 private:
  World& world_;
  ValidationReport report_;
};

/// The base, and it recorded in every way.
std::vector<SyntheticOptions> recorded(const SyntheticOptions& base) {
  std::vector<SyntheticOptions> result{base};
  for (const Mode mode : {Mode::kTrue, Mode::kResident}) {
    for (const ColumnwisePolicy policy :
         {ColumnwisePolicy::kRelease, ColumnwisePolicy::kResident, ColumnwisePolicy::kDirect}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
        SyntheticOptions variant = base;
        variant.execution.reshard_after_forward = {mode};
        variant.execution.columnwise = policy;
        variant.recompute = recompute;
        variant.cuda_graph = true;
        result.push_back(variant);
      }
    }
  }
  return result;
}

std::vector<SyntheticOptions> variants(const SyntheticOptions& base,
                                       const std::vector<ReshardAfterForward>& modes) {
  std::vector<SyntheticOptions> result{base};
  for (const ReshardAfterForward& mode : modes) {
    for (const int prefetch : {0, 1, 2}) {
      for (const ColumnwisePolicy policy :
           {ColumnwisePolicy::kRelease, ColumnwisePolicy::kResident}) {
        for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
          if (recompute == Recompute::kBlock && prefetch == 2)
            continue;
          SyntheticOptions variant = base;
          variant.execution.reshard_after_forward = mode;
          variant.execution.prefetch = prefetch;
          variant.execution.columnwise = policy;
          variant.recompute = recompute;
          result.push_back(variant);
        }
      }
    }
  }
  return result;
}

std::optional<ReshardAfterForward> smallest_group(int ranks) {
  for (int k = 2; k <= ranks; ++k) {
    if (ranks % k == 0)
      return ReshardAfterForward{Mode::kGroup, k};
  }
  return std::nullopt;
}

SyntheticOptions with(SyntheticOptions options, ReshardAfterForward mode, int prefetch = 1) {
  options.execution.reshard_after_forward = mode;
  options.execution.prefetch = prefetch;
  return options;
}

}  // namespace

const char* to_string(ValidationMode mode) {
  for (const auto& [known, name] : kModes) {
    if (known == mode)
      return name;
  }
  return "?";
}

ValidationMode parse_validation_mode(const std::string& text) {
  std::string names;
  for (const auto& [mode, name] : kModes) {
    if (text == name)
      return mode;
    names += message(names.empty() ? "" : ", ", name);
  }
  throw ConfigError(message("validate ", text, ": use one of ", names));
}

bool ValidationReport::passed() const {
  return skipped.empty() &&
         std::ranges::all_of(checks, [](const ValidationCheck& check) { return check.ok; });
}

ValidationReport validate(World& world, ValidationMode mode) {
  Validation validation(world);
  ValidationReport& report = validation.report();
  SyntheticOptions base = small_model(world);
  const int size = world.size();
  if (mode == ValidationMode::kSingle && size > 1) {
    report.skipped = message("single is one rank; ", size, " were started");
    return report;
  }
  if (mode != ValidationMode::kSingle && mode != ValidationMode::kMxfp8 && size < 2) {
    report.skipped = message(to_string(mode), " needs at least 2 ranks; 1 was started");
    return report;
  }
  switch (mode) {
    case ValidationMode::kSingle:
      validation.same_bits("release, resident and recompute", variants(base, {{Mode::kTrue}}));
      if (world.device().is_cuda())
        validation.same_bits("recorded steps against eager ones", recorded(base));
      validation.bytes_as_planned(base);
      validation.other_phases(base);
      break;
    case ValidationMode::kFsdp2Reshard: {
      std::vector<ReshardAfterForward> modes{{Mode::kTrue}};
      if (const auto group = smallest_group(size))
        modes.push_back(*group);
      validation.same_bits("reshard, prefetch, release and recompute", variants(base, modes));
      validation.near_one_rank(base);
      for (const ReshardAfterForward& reshard : modes) {
        for (const int prefetch : {0, 1, 2})
          validation.bytes_as_planned(with(base, reshard, prefetch));
        validation.other_phases(with(base, reshard));
      }
      validation.options_that_differ(base);
      break;
    }
    case ValidationMode::kFsdp2Keep: {
      validation.same_bits("keep and resident against reshard",
                           variants(base, {{Mode::kFalse}, {Mode::kResident}}));
      for (const Mode keep : {Mode::kFalse, Mode::kResident}) {
        validation.bytes_as_planned(with(base, {keep}));
        validation.other_phases(with(base, {keep}));
      }
      SyntheticOptions accumulated = base, kept = with(base, {Mode::kFalse});
      accumulated.grad_accum = kept.grad_accum = 3;
      kept.execution.keep_over_accumulation = true;
      validation.same_bits("three micro-batches, units kept from one to the next or not",
                           {accumulated, with(accumulated, {Mode::kFalse}), kept,
                            with(accumulated, {Mode::kResident})});
      validation.bytes_as_planned(kept);
      break;
    }
    case ValidationMode::kHsdp: {
      if (size % 2 != 0) {
        report.skipped = message("hsdp needs an even number of ranks; ", size, " were started");
        return report;
      }
      SyntheticOptions replicated = base;
      replicated.execution.dp_replicate = 2;
      replicated.execution.dp_shard = size / 2;
      std::vector<SyntheticOptions> all{base};
      for (const Mode reshard : {Mode::kTrue, Mode::kFalse, Mode::kResident})
        all.push_back(with(replicated, {reshard}));
      validation.same_bits(message("2 replicas of ", size / 2, " against ", size, " shards"), all);
      validation.near_one_rank(replicated);
      validation.bytes_as_planned(replicated);
      validation.other_phases(replicated);
      break;
    }
    case ValidationMode::kTpSp:
    case ValidationMode::kFsdp2Tp: {
      const bool both = mode == ValidationMode::kFsdp2Tp;
      if (both && (size < 4 || size % 2 != 0)) {
        report.skipped = message("fsdp2-tp needs an even number of at least 4 ranks; ", size,
                                 size == 1 ? " was started" : " were started");
        return report;
      }
      const SyntheticOptions split = splittable_model(world, both ? size / 2 : size);
      for (const bool sequence : {true, false}) {
        SyntheticOptions first = split;
        first.execution.sequence_parallel = sequence;
        std::vector<SyntheticOptions> all = variants(first, {{Mode::kTrue}});
        for (const Mode keep : {Mode::kFalse, Mode::kResident})
          all.push_back(with(first, {keep}));
        all.push_back(first);
        all.back().execution.tp_overlap = false;
        all.push_back(first);
        all.back().execution.columnwise = ColumnwisePolicy::kDirect;
        const int data_ranks = first.execution.dp_shard;
        if (const auto smaller = smallest_group(data_ranks))
          all.push_back(with(first, *smaller));
        if (data_ranks % 2 == 0) {
          all.push_back(first);
          all.back().execution.dp_replicate = 2;
          all.back().execution.dp_shard = data_ranks / 2;
        }
        const char* name = sequence ? "with sequence parallelism" : "with all tokens on each rank";
        validation.same_bits(
            message("overlap, reshard, replicas, columnwise and recompute, ", name), all);
        validation.near_one_rank(first);
        validation.bytes_as_planned(first);
      }
      validation.other_phases(split);
      validation.options_that_differ(split);
      break;
    }
    case ValidationMode::kGrouped:
      validate_grouped(world,
                       [&](const auto& name, const auto& run) { validation.check(name, run); });
      break;
    case ValidationMode::kMxfp8:
      base.execution.recipe = Recipe::kMx;
      validation.same_bits("reshard, keep, resident, prefetch and recompute",
                           variants(base, {{Mode::kTrue}, {Mode::kFalse}, {Mode::kResident}}));
      validation.near_one_rank(base);
      for (const Mode reshard : {Mode::kTrue, Mode::kFalse, Mode::kResident}) {
        validation.bytes_as_planned(with(base, {reshard}));
        validation.other_phases(with(base, {reshard}));
      }
      validation.training_after_inference_needs_a_source(base);
      break;
  }
  return report;
}

}  // namespace rowshard
