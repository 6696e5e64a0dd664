// Environment variables for the length of a scope. Every variable that a launcher may set is
// removed first, so that tests mean the same under any launcher.
#pragma once

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

namespace rowshard::testing {

class ScopedEnvironment {
 public:
  using Values = std::map<std::string, std::string>;

  explicit ScopedEnvironment(Values values) : values_(std::move(values)) {
    for (const char* name : {"RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "TORCHELASTIC_RUN_ID",
                             "TORCHELASTIC_RESTART_COUNT",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMI_RANK",
                             "PMI_SIZE",
                             "PMIX_RANK",
                             "MPI_LOCALRANKID",
                             "MPI_LOCALNRANKS",
                             "SLURM_STEP_ID",
                             "SLURM_PROCID",
                             "SLURM_NTASKS",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_LOCALID",
                             "SLURM_JOB_ID",
                             "SLURM_STEP_NODELIST",
                             "SLURM_JOB_NODELIST",
                             "SLURM_NODELIST",
                             "ROWSHARD_LAUNCHER",
                             "ROWSHARD_PORT",
                             "ROWSHARD_COMM_TIMEOUT"}) {
      set(name, nullptr);
    }
    for (const auto& [name, value] : values_)
      set(name, value.c_str());
  }
  ScopedEnvironment(const char* name, const char* value)
      : ScopedEnvironment(Values{{name, value}}) {}
  ~ScopedEnvironment() {
    for (const auto& [name, value] : before_) {
      if (value) {
        setenv(name.c_str(), value->c_str(), 1);
      } else {
        unsetenv(name.c_str());
      }
    }
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

  /// These variables and `more`, in a scope inside this one.
  ScopedEnvironment with(const Values& more) const {
    Values values = values_;
    for (const auto& [name, value] : more)
      values[name] = value;
    return ScopedEnvironment(values);
  }

 private:
  void set(const std::string& name, const char* value) {
    const char* old = std::getenv(name.c_str());
    before_.emplace(name, old ? std::optional<std::string>(old) : std::nullopt);
    if (value) {
      setenv(name.c_str(), value, 1);
    } else {
      unsetenv(name.c_str());
    }
  }

  Values values_;
  std::map<std::string, std::optional<std::string>> before_;
};

}  // namespace rowshard::testing
