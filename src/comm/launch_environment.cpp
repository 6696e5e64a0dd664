#include "comm/launch_environment.h"

#include <array>
#include <vector>

#include "core/environment.h"
#include "core/error.h"

namespace rowshard {
namespace {

// Far enough from the ports that torchrun hands out side by side, so that two agents on one node do
// not meet each other's job.
constexpr int kPortOffset = 1000;
constexpr int kSlurmPortBase = 21000;
constexpr int kSlurmPorts = 8000;

int required(const char* name, Launcher launcher) {
  const auto value = environment_int(name);
  ROWSHARD_CHECK(value.has_value(), ConfigError, "started by ", to_string(launcher), ", but ", name,
                 " is not set; set it, or ROWSHARD_LAUNCHER=none to run as one rank");
  return *value;
}

int port_beside(int launcher_port) {
  return launcher_port + kPortOffset <= 65000 ? launcher_port + kPortOffset
                                              : launcher_port - kPortOffset;
}

/// "node[07-09,12],gpu3" -> "node07".
std::string first_host(const std::string& list) {
  const size_t bracket = list.find('[');
  const size_t comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket)
    return list.substr(0, comma);
  const size_t end = list.find_first_of("-,]", bracket);
  const size_t close = list.find(']', bracket);
  ROWSHARD_CHECK(end != std::string::npos && close != std::string::npos, ConfigError,
                 "cannot read the node list ", list, "; set MASTER_ADDR to the node of rank 0");
  const size_t suffix_end = list.find(',', close);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1) +
         list.substr(close + 1,
                     suffix_end == std::string::npos ? suffix_end : suffix_end - close - 1);
}

LaunchEnvironment read_torchrun() {
  LaunchEnvironment launch;
  launch.launcher = Launcher::kTorchrun;
  launch.rank = required("RANK", launch.launcher);
  launch.world_size = required("WORLD_SIZE", launch.launcher);
  launch.local_rank = required("LOCAL_RANK", launch.launcher);
  launch.local_world_size = environment_int("LOCAL_WORLD_SIZE").value_or(0);
  const auto address = environment("MASTER_ADDR");
  ROWSHARD_CHECK(address.has_value(), ConfigError,
                 "started by torchrun, but MASTER_ADDR is not set; set it to the node of rank 0");
  launch.master_addr = *address;
  const int port = required("MASTER_PORT", launch.launcher);
  launch.master_port = port_beside(port);
  launch.job_id = message("torchrun ", *address, ":", port, " ",
                          environment("TORCHELASTIC_RUN_ID").value_or(""), " ",
                          environment("TORCHELASTIC_RESTART_COUNT").value_or("0"));
  return launch;
}

LaunchEnvironment read_open_mpi() {
  LaunchEnvironment launch;
  launch.launcher = Launcher::kOpenMpi;
  launch.rank = required("OMPI_COMM_WORLD_RANK", launch.launcher);
  launch.world_size = required("OMPI_COMM_WORLD_SIZE", launch.launcher);
  launch.local_rank = environment_int("OMPI_COMM_WORLD_LOCAL_RANK").value_or(-1);
  launch.local_world_size = environment_int("OMPI_COMM_WORLD_LOCAL_SIZE").value_or(0);
  return launch;
}

LaunchEnvironment read_pmi() {
  LaunchEnvironment launch;
  launch.launcher = Launcher::kPmi;
  // srun --mpi=pmix sets PMIX_RANK; the size is Slurm's.
  launch.rank = environment("PMI_RANK") ? required("PMI_RANK", launch.launcher)
                                        : required("PMIX_RANK", launch.launcher);
  launch.world_size = environment("PMI_SIZE") ? required("PMI_SIZE", launch.launcher)
                                              : required("SLURM_NTASKS", launch.launcher);
  launch.local_rank =
      environment_int("MPI_LOCALRANKID").value_or(environment_int("SLURM_LOCALID").value_or(-1));
  launch.local_world_size = environment_int("MPI_LOCALNRANKS").value_or(0);
  return launch;
}

LaunchEnvironment read_slurm() {
  LaunchEnvironment launch;
  launch.launcher = Launcher::kSlurm;
  launch.rank = required("SLURM_PROCID", launch.launcher);
  launch.world_size = environment("SLURM_STEP_NUM_TASKS")
                          ? required("SLURM_STEP_NUM_TASKS", launch.launcher)
                          : required("SLURM_NTASKS", launch.launcher);
  launch.local_rank = required("SLURM_LOCALID", launch.launcher);
  launch.local_world_size = 0;
  if (const auto address = environment("MASTER_ADDR")) {
    launch.master_addr = *address;
  } else {
    for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
      if (const auto list = environment(name)) {
        launch.master_addr = first_host(*list);
        break;
      }
    }
  }
  const int job = environment_int("SLURM_JOB_ID").value_or(0);
  const int step = environment_int("SLURM_STEP_ID").value_or(0);
  const auto port = environment_int("MASTER_PORT");
  launch.master_port = port ? port_beside(*port) : kSlurmPortBase + (job * 16 + step) % kSlurmPorts;
  launch.job_id = message("slurm ", job, ".", step);
  return launch;
}

LaunchEnvironment read(Launcher launcher) {
  switch (launcher) {
    case Launcher::kTorchrun:
      return read_torchrun();
    case Launcher::kOpenMpi:
      return read_open_mpi();
    case Launcher::kPmi:
      return read_pmi();
    case Launcher::kSlurm:
      return read_slurm();
    case Launcher::kNone:
      break;
  }
  return {};
}

void check_ranges(const LaunchEnvironment& launch) {
  ROWSHARD_CHECK(launch.world_size >= 1 && launch.rank >= 0 && launch.rank < launch.world_size,
                 ConfigError, to_string(launch.launcher), " says rank ", launch.rank, " of ",
                 launch.world_size, "; a rank is 0 … size - 1");
  ROWSHARD_CHECK(launch.local_rank >= -1 && launch.local_world_size >= 0 &&
                     (launch.local_world_size == 0 || launch.local_rank < launch.local_world_size),
                 ConfigError, to_string(launch.launcher), " says local rank ", launch.local_rank,
                 " of ", launch.local_world_size, " on this node");
  const bool meets_over_tcp = launch.launcher != Launcher::kNone && !uses_mpi(launch.launcher);
  ROWSHARD_CHECK(!meets_over_tcp || (launch.master_port > 0 && launch.master_port < 65536),
                 ConfigError, "port ", launch.master_port,
                 " for rank 0 is no port; set ROWSHARD_PORT to a free one");
}

std::vector<Launcher> present_launchers() {
  std::vector<Launcher> present;
  if (environment("RANK") && environment("WORLD_SIZE")) {
    present.push_back(Launcher::kTorchrun);
  } else {
    const char* set = environment("RANK") ? "RANK" : environment("WORLD_SIZE") ? "WORLD_SIZE" : "";
    ROWSHARD_CHECK(!*set, ConfigError, set, " is set without ", *set == 'R' ? "WORLD_SIZE" : "RANK",
                   "; torchrun sets both. Unset it, or set ROWSHARD_LAUNCHER to the launcher used");
  }
  if (environment("OMPI_COMM_WORLD_SIZE"))
    present.push_back(Launcher::kOpenMpi);
  const bool slurm_step = environment("SLURM_STEP_ID") && environment("SLURM_PROCID");
  if (environment("PMI_SIZE") && !slurm_step)
    present.push_back(Launcher::kPmi);
  if (present.empty() && slurm_step)
    present.push_back(Launcher::kSlurm);
  return present;
}

}  // namespace

const char* to_string(Launcher launcher) {
  switch (launcher) {
    case Launcher::kNone:
      return "none";
    case Launcher::kTorchrun:
      return "torchrun";
    case Launcher::kOpenMpi:
      return "openmpi";
    case Launcher::kPmi:
      return "pmi";
    case Launcher::kSlurm:
      return "slurm";
  }
  return "?";
}

bool uses_mpi(Launcher launcher) {
  return launcher == Launcher::kOpenMpi || launcher == Launcher::kPmi;
}

LaunchEnvironment detect_launch_environment() {
  LaunchEnvironment launch;
  if (const auto wanted = environment("ROWSHARD_LAUNCHER")) {
    bool known = false;
    for (const Launcher launcher : {Launcher::kNone, Launcher::kTorchrun, Launcher::kOpenMpi,
                                    Launcher::kPmi, Launcher::kSlurm}) {
      if (*wanted != to_string(launcher))
        continue;
      known = true;
      launch = read(launcher);
    }
    ROWSHARD_CHECK(known, ConfigError, "ROWSHARD_LAUNCHER=", *wanted,
                   ": use none, torchrun, openmpi, pmi or slurm");
  } else {
    const std::vector<Launcher> present = present_launchers();
    if (!present.empty())
      launch = read(present.front());
    for (const Launcher launcher : present) {
      const LaunchEnvironment other = read(launcher);
      ROWSHARD_CHECK(other.rank == launch.rank && other.world_size == launch.world_size,
                     ConfigError, to_string(launch.launcher), " says rank ", launch.rank, " of ",
                     launch.world_size, ", but ", to_string(launcher), " says rank ", other.rank,
                     " of ", other.world_size, "; set ROWSHARD_LAUNCHER to the one that counts");
    }
  }
  if (const auto port = environment_int("ROWSHARD_PORT"))
    launch.master_port = *port;
  check_ranges(launch);
  return launch;
}

}  // namespace rowshard
