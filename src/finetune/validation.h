// `rowshard validate MODE`: is what this mode of parallelism promises true on these ranks? A small
// model with random weights is trained a few steps in every variant of the mode; results must not
// differ by a bit, bytes must be the plan's. No file is read.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/world.h"
#include "finetune/options.h"

namespace rowshard {

enum class ValidationMode {
  kSingle,
  kFsdp2Reshard,
  kFsdp2Keep,
  kHsdp,
  kTpSp,
  kFsdp2Tp,
  kGrouped,
  kMxfp8
};
const char* to_string(ValidationMode mode);  // "single", "fsdp2-reshard", …
/// ConfigError for a mode that is none.
ValidationMode parse_validation_mode(const std::string& text);

struct ValidationCheck {
  std::string name;
  bool ok = true;
  std::string detail;  // figures; of a failure, what was found on which rank
};

struct ValidationReport {
  std::vector<ValidationCheck> checks;
  std::string skipped;  // why nothing was checked; empty: it was

  bool passed() const;
};

/// Collective; the same report on every rank.
ValidationReport validate(World& world, ValidationMode mode);

}  // namespace rowshard
