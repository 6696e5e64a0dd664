// Who started this process, and which rank it is: read from the environment alone.
//
// Nothing is initialised here: MPI_Init outside an MPI launcher would make every process rank 0
// of 1. Recognised, with the variables each is recognised by:
//   torchrun   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
//   Open MPI   OMPI_COMM_WORLD_RANK and _SIZE
//   PMI        PMI_RANK and PMI_SIZE (MPICH, Intel MPI)
//   Slurm      SLURM_STEP_ID, SLURM_PROCID, SLURM_NTASKS (srun; needs no PMI, ranks meet over TCP)
// torchrun, Open MPI and PMI set together must agree on rank and size; Slurm's variables are
// ignored beside them, because mpirun and torchrun inside a Slurm job inherit those of their own
// parent. ROWSHARD_LAUNCHER=none|torchrun|openmpi|pmi|slurm decides instead.
#pragma once

#include <string>

namespace rowshard {

enum class Launcher { kNone, kTorchrun, kOpenMpi, kPmi, kSlurm };
const char* to_string(Launcher launcher);
/// True where ranks meet through MPI; the others meet over TCP.
bool uses_mpi(Launcher launcher);

struct LaunchEnvironment {
  Launcher launcher = Launcher::kNone;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        // -1: the launcher does not say; World finds out from host names
  int local_world_size = 1;  // 0: likewise
  std::string master_addr = "127.0.0.1";
  int master_port = 0;  // where rank 0 waits for the others over TCP; never the launcher's own port
  std::string job_id;   // tells this job's ranks from another job's on the same port
};

/// Throws ConfigError when variables are missing, no integers, out of range or contradictory.
LaunchEnvironment detect_launch_environment();

}  // namespace rowshard
