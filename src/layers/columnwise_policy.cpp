#include "layers/columnwise_policy.h"

#include "core/environment.h"
#include "core/error.h"
#include "core/log.h"

namespace rowshard {

const char* to_string(ColumnwisePolicy policy) {
  switch (policy) {
    case ColumnwisePolicy::kRelease:
      return "release";
    case ColumnwisePolicy::kResident:
      return "resident";
    case ColumnwisePolicy::kDirect:
      return "direct";
    case ColumnwisePolicy::kAuto:
      return "auto";
  }
  return "?";
}

ColumnwisePolicy columnwise_policy(ColumnwisePolicy asked) {
  // The second name is that of TransformerEngine, so that its job scripts keep their meaning.
  for (const char* name :
       {"ROWSHARD_RELEASE_FROZEN_WEIGHT_COLUMNWISE", "NVTE_RELEASE_FROZEN_WEIGHT_COLUMNWISE"}) {
    const std::optional<bool> release = environment_switch(name);
    if (!release)
      continue;
    const ColumnwisePolicy policy =
        *release ? ColumnwisePolicy::kRelease : ColumnwisePolicy::kResident;
    if (policy != asked) {
      log_once(name, message(name, "=", *release ? 1 : 0, " overrides the columnwise policy ",
                             to_string(asked)));
    }
    return policy;
  }
  return asked;
}

}  // namespace rowshard
