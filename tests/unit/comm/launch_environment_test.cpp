#include "comm/launch_environment.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "unit/comm/scoped_environment.h"

namespace rowshard {
namespace {

using testing::ScopedEnvironment;

std::string detect_error() {
  try {
    detect_launch_environment();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}
std::string error_of(const ScopedEnvironment::Values& values) {
  const ScopedEnvironment env(values);
  return detect_error();
}

TEST(LaunchEnvironment, NothingSetIsOneRank) {
  const ScopedEnvironment env({});
  const LaunchEnvironment launch = detect_launch_environment();
  EXPECT_EQ(launch.launcher, Launcher::kNone);
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.world_size, 1);
  EXPECT_EQ(launch.local_rank, 0);
}

TEST(LaunchEnvironment, Torchrun) {
  const ScopedEnvironment env({{"RANK", "5"},
                               {"WORLD_SIZE", "8"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "node7"},
                               {"MASTER_PORT", "29500"},
                               {"TORCHELASTIC_RUN_ID", "run"}});
  const LaunchEnvironment launch = detect_launch_environment();
  EXPECT_EQ(launch.launcher, Launcher::kTorchrun);
  EXPECT_FALSE(uses_mpi(launch.launcher));
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.world_size, 8);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_world_size, 4);
  EXPECT_EQ(launch.master_addr, "node7");
  EXPECT_NE(launch.master_port, 29500) << "the torchrun agent owns that port";
  EXPECT_NE(launch.job_id.find("run"), std::string::npos);
}

TEST(LaunchEnvironment, PortStaysAPortNearTheUpperEnd) {
  const ScopedEnvironment env({{"RANK", "0"},
                               {"WORLD_SIZE", "2"},
                               {"LOCAL_RANK", "0"},
                               {"MASTER_ADDR", "a"},
                               {"MASTER_PORT", "65530"}});
  const int port = detect_launch_environment().master_port;
  EXPECT_GT(port, 1024);
  EXPECT_LT(port, 65500);
}

TEST(LaunchEnvironment, OwnPortVariableWins) {
  const ScopedEnvironment env({{"RANK", "0"},
                               {"WORLD_SIZE", "2"},
                               {"LOCAL_RANK", "0"},
                               {"MASTER_ADDR", "a"},
                               {"MASTER_PORT", "29500"},
                               {"ROWSHARD_PORT", "12345"}});
  EXPECT_EQ(detect_launch_environment().master_port, 12345);
}

TEST(LaunchEnvironment, OpenMpi) {
  const ScopedEnvironment env({{"OMPI_COMM_WORLD_RANK", "3"},
                               {"OMPI_COMM_WORLD_SIZE", "4"},
                               {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                               {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                               {"PMIX_RANK", "3"}});
  const LaunchEnvironment launch = detect_launch_environment();
  EXPECT_EQ(launch.launcher, Launcher::kOpenMpi);
  EXPECT_TRUE(uses_mpi(launch.launcher));
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.world_size, 4);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_world_size, 2);
}

TEST(LaunchEnvironment, PmiLeavesLocalRankOpenWhenItIsNotTold) {
  const ScopedEnvironment env({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
  const LaunchEnvironment launch = detect_launch_environment();
  EXPECT_EQ(launch.launcher, Launcher::kPmi);
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.local_rank, -1);
  EXPECT_EQ(launch.local_world_size, 0);
}

TEST(LaunchEnvironment, SlurmMeetsOnTheFirstNodeOfTheList) {
  const std::pair<const char*, const char*> lists[] = {
      {"gpu[07-09,12],cpu1", "gpu07"}, {"gpu3,gpu4", "gpu3"},   {"gpu3", "gpu3"},
      {"a[1,3]-ib,b2", "a1-ib"},       {"x2,gpu[01-02]", "x2"},
  };
  for (const auto& [list, first] : lists) {
    const ScopedEnvironment env({{"SLURM_STEP_ID", "0"},
                                 {"SLURM_PROCID", "2"},
                                 {"SLURM_NTASKS", "4"},
                                 {"SLURM_LOCALID", "0"},
                                 {"SLURM_JOB_ID", "991"},
                                 {"SLURM_STEP_NODELIST", list}});
    const LaunchEnvironment launch = detect_launch_environment();
    EXPECT_EQ(launch.launcher, Launcher::kSlurm);
    EXPECT_EQ(launch.rank, 2);
    EXPECT_EQ(launch.world_size, 4);
    EXPECT_EQ(launch.master_addr, first) << list;
    EXPECT_GT(launch.master_port, 1024);
  }
}

TEST(LaunchEnvironment, SlurmWithPmi2StillMeetsOverTcp) {
  const ScopedEnvironment env({{"SLURM_STEP_ID", "0"},
                               {"SLURM_PROCID", "1"},
                               {"SLURM_NTASKS", "2"},
                               {"SLURM_LOCALID", "1"},
                               {"PMI_RANK", "1"},
                               {"PMI_SIZE", "2"}});
  EXPECT_EQ(detect_launch_environment().launcher, Launcher::kSlurm);
}

TEST(LaunchEnvironment, BatchScriptWithoutSrunIsOneRank) {
  const ScopedEnvironment env({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}});
  EXPECT_EQ(detect_launch_environment().launcher, Launcher::kNone);
}

TEST(LaunchEnvironment, MpirunAndTorchrunInsideSlurmIgnoreItsVariables) {
  const ScopedEnvironment slurm(
      {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}});
  {
    ScopedEnvironment env = slurm.with({{"OMPI_COMM_WORLD_RANK", "1"},
                                        {"OMPI_COMM_WORLD_SIZE", "2"},
                                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}});
    EXPECT_EQ(detect_launch_environment().launcher, Launcher::kOpenMpi);
  }
  {
    ScopedEnvironment env = slurm.with({{"RANK", "1"},
                                        {"WORLD_SIZE", "2"},
                                        {"LOCAL_RANK", "1"},
                                        {"MASTER_ADDR", "a"},
                                        {"MASTER_PORT", "1234"}});
    EXPECT_EQ(detect_launch_environment().launcher, Launcher::kTorchrun);
  }
}

TEST(LaunchEnvironment, LaunchersThatDisagreeAreRefusedAndTheVariableDecides) {
  const ScopedEnvironment env({{"RANK", "3"},
                               {"WORLD_SIZE", "4"},
                               {"LOCAL_RANK", "3"},
                               {"MASTER_ADDR", "a"},
                               {"MASTER_PORT", "29500"},
                               {"OMPI_COMM_WORLD_RANK", "0"},
                               {"OMPI_COMM_WORLD_SIZE", "2"}});
  const std::string text = detect_error();
  EXPECT_NE(text.find("torchrun says rank 3 of 4"), std::string::npos) << text;
  EXPECT_NE(text.find("openmpi says rank 0 of 2"), std::string::npos) << text;
  EXPECT_NE(text.find("ROWSHARD_LAUNCHER"), std::string::npos) << text;
  {
    ScopedEnvironment chosen = env.with({{"ROWSHARD_LAUNCHER", "openmpi"}});
    EXPECT_EQ(detect_launch_environment().world_size, 2);
  }
  {
    ScopedEnvironment chosen = env.with({{"ROWSHARD_LAUNCHER", "none"}});
    EXPECT_EQ(detect_launch_environment().world_size, 1);
  }
  {
    ScopedEnvironment chosen = env.with({{"ROWSHARD_LAUNCHER", "mpirun"}});
    EXPECT_NE(detect_error().find("ROWSHARD_LAUNCHER=mpirun"), std::string::npos);
  }
}

TEST(LaunchEnvironment, LaunchersThatAgreeAreAccepted) {
  const ScopedEnvironment env({{"RANK", "1"},
                               {"WORLD_SIZE", "2"},
                               {"LOCAL_RANK", "1"},
                               {"MASTER_ADDR", "a"},
                               {"MASTER_PORT", "29500"},
                               {"OMPI_COMM_WORLD_RANK", "1"},
                               {"OMPI_COMM_WORLD_SIZE", "2"}});
  EXPECT_EQ(detect_launch_environment().rank, 1);
}

TEST(LaunchEnvironment, HalfSetOrWrongVariablesSayWhichOne) {
  const auto names = [](const ScopedEnvironment::Values& values, const std::string& what) {
    const std::string text = error_of(values);
    EXPECT_NE(text.find(what), std::string::npos) << "wanted " << what << " in: " << text;
  };
  names({{"RANK", "1"}}, "WORLD_SIZE");
  names({{"WORLD_SIZE", "2"}}, "RANK");
  names({{"RANK", "1"}, {"WORLD_SIZE", "2"}}, "LOCAL_RANK");
  names({{"RANK", "two"}, {"WORLD_SIZE", "2"}}, "RANK=two");
  names({{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "2"}}, "rank 2 of 2");
}

}  // namespace
}  // namespace rowshard
