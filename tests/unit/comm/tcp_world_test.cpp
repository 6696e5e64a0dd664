// Jobs of several processes that meet over TCP, as under torchrun, started by fork: the start-up
// and every way in which it and a running job can fail. The collectives themselves are tested in
// tests/distributed.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "comm/tcp_socket.h"
#include "comm/world.h"
#include "unit/comm/scoped_environment.h"

namespace rowshard {
namespace {

using testing::ScopedEnvironment;

int next_port() {
  static int port = 0;
  // Below the ports that the kernel hands out itself, and apart from another run of this test.
  if (port == 0)
    port = 10000 + static_cast<int>(getpid() % 150) * 140;
  return port += 10;
}

LaunchEnvironment launch_of(int rank, int size, int port) {
  LaunchEnvironment launch;
  launch.launcher = Launcher::kTorchrun;
  launch.rank = rank;
  launch.world_size = size;
  launch.local_rank = rank;
  launch.local_world_size = size;
  launch.master_port = port;
  launch.job_id = message("test ", port);
  return launch;
}

/// Runs body(rank) in a process of its own for every rank given, and returns what each said: the
/// result, or the text of the exception.
std::vector<std::string> run_ranks(const std::vector<int>& ranks,
                                   const std::function<std::string(int)>& body) {
  std::vector<int> pipes;
  std::vector<pid_t> children;
  for (const int rank : ranks) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      std::string said;
      try {
        said = body(rank);
      } catch (const std::exception& error) {
        said = error.what();
      }
      const ssize_t written = write(ends[1], said.data(), said.size());
      _exit(written == static_cast<ssize_t>(said.size()) ? 0 : 1);
    }
    close(ends[1]);
    pipes.push_back(ends[0]);
    children.push_back(child);
  }
  std::vector<std::string> said(ranks.size());
  for (size_t i = 0; i < ranks.size(); ++i) {
    char buffer[512];
    for (ssize_t got; (got = read(pipes[i], buffer, sizeof(buffer))) > 0;) {
      said[i].append(buffer, static_cast<size_t>(got));
    }
    close(pipes[i]);
    waitpid(children[i], nullptr, 0);
  }
  return said;
}

/// A job whose ranks run `body` and, as `launch` does, abort on an exception.
std::vector<std::string> run_job(int size, const std::function<std::string(World&)>& body) {
  const int port = next_port();
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.push_back(rank);
  return run_ranks(ranks, [&](int rank) -> std::string {
    const auto world = World::create(launch_of(rank, size, port), DeviceKind::kHost);
    try {
      return body(*world);
    } catch (const std::exception& error) {
      world->abort(error.what());
      throw;
    }
  });
}

int32_t sum_over_ranks(World& world) {
  auto comm = world.communicator("reduce");
  Stream stream(kHost);
  int32_t value = 1 << world.rank();
  comm->all_reduce(View(&value, DType::kI32, {1}, kHost), Reduction::kSum, stream);
  return value;
}

TEST(TcpWorld, RanksMeetAndReduce) {
  for (const int size : {2, 3, 4}) {
    for (const std::string& said :
         run_job(size, [](World& world) { return std::to_string(sum_over_ranks(world)); })) {
      EXPECT_EQ(said, std::to_string((1 << size) - 1));
    }
  }
}

TEST(TcpWorld, LocalRanksAreFoundFromHostNamesWhenTheLauncherIsSilent) {
  const int port = next_port();
  const auto said = run_ranks({0, 1, 2}, [&](int rank) {
    LaunchEnvironment launch = launch_of(rank, 3, port);
    launch.local_rank = -1;
    launch.local_world_size = 0;
    const auto world = World::create(launch, DeviceKind::kHost);
    return message(world->launch().local_rank, " of ", world->launch().local_world_size);
  });
  EXPECT_EQ(said, (std::vector<std::string>{"0 of 3", "1 of 3", "2 of 3"}));
}

TEST(TcpWorld, TakenPortMovesToTheNextOne) {
  const int port = next_port();
  const auto taken = listen_on(port);  // accepts and never answers, like another program's server
  ASSERT_TRUE(taken.has_value());
  const auto said = run_ranks({0, 1}, [&](int rank) {
    const auto world = World::create(launch_of(rank, 2, port), DeviceKind::kHost);
    return std::to_string(sum_over_ranks(*world));
  });
  EXPECT_EQ(said, (std::vector<std::string>{"3", "3"}));
}

TEST(TcpWorld, TwoJobsOnOnePortDoNotMix) {
  const int port = next_port();
  const auto said = run_ranks({0, 1, 2, 3}, [&](int process) {
    LaunchEnvironment launch = launch_of(process % 2, 2, port);
    launch.job_id = process < 2 ? "one" : "two";
    const auto world = World::create(launch, DeviceKind::kHost);
    const auto jobs = world->bootstrap().all_gather(launch.job_id);
    return jobs[0] + jobs[1];
  });
  EXPECT_EQ(said, (std::vector<std::string>{"oneone", "oneone", "twotwo", "twotwo"}));
}

TEST(TcpWorld, MissingRanksAreNamedOnEveryRankThatCame) {
  const ScopedEnvironment env("ROWSHARD_COMM_TIMEOUT", "1");
  const int port = next_port();
  const double begin = now_seconds();
  const auto said = run_ranks({0, 2}, [&](int rank) -> std::string {
    World::create(launch_of(rank, 4, port), DeviceKind::kHost);
    return "started without ranks 1 and 3";
  });
  EXPECT_LT(now_seconds() - begin, 10);
  for (const std::string& text : said) {
    EXPECT_NE(text.find("ranks 1, 3 of 4 did not come"), std::string::npos) << text;
  }
}

TEST(TcpWorld, MissingRankZeroNamesAddressAndPort) {
  const ScopedEnvironment env("ROWSHARD_COMM_TIMEOUT", "0.5");
  const int port = next_port();
  const auto said = run_ranks({1}, [&](int rank) -> std::string {
    World::create(launch_of(rank, 2, port), DeviceKind::kHost);
    return "started without rank 0";
  });
  EXPECT_NE(said[0].find(message("did not find rank 0 at 127.0.0.1:", port)), std::string::npos)
      << said[0];
}

TEST(TcpWorld, RanksOfDifferentWorldSizesAreRefused) {
  const ScopedEnvironment env("ROWSHARD_COMM_TIMEOUT", "5");
  const int port = next_port();
  const auto said = run_ranks({0, 1}, [&](int rank) -> std::string {
    World::create(launch_of(rank, rank == 0 ? 2 : 3, port), DeviceKind::kHost);
    return "started";
  });
  for (const std::string& text : said) {
    EXPECT_NE(text.find("rank 1 of 3 came to a job of 2 ranks"), std::string::npos) << text;
  }
}

TEST(TcpWorld, AThrowingRankEndsTheOthersWithItsMessage) {
  const double begin = now_seconds();
  const auto said = run_job(3, [](World& world) -> std::string {
    sum_over_ranks(world);
    if (world.rank() == 1)
      throw ConfigError("the data file is empty");
    return std::to_string(sum_over_ranks(world));
  });
  EXPECT_LT(now_seconds() - begin, 10);
  EXPECT_EQ(said[1], "the data file is empty");
  for (const int rank : {0, 2}) {
    EXPECT_EQ(said[rank], "rank 1 ended the job: the data file is empty");
  }
}

TEST(TcpWorld, ADyingRankIsNamed) {
  const auto said = run_job(2, [](World& world) -> std::string {
    sum_over_ranks(world);
    if (world.rank() == 1)
      _exit(3);
    return std::to_string(sum_over_ranks(world));
  });
  EXPECT_NE(said[0].find("rank 1 closed its connection"), std::string::npos) << said[0];
}

TEST(TcpWorld, AStuckRankIsNamedWithTheCollectiveInsideTheDeadline) {
  const ScopedEnvironment env("ROWSHARD_COMM_TIMEOUT", "1");
  const double begin = now_seconds();
  const auto said = run_job(3, [](World& world) -> std::string {
    auto comm = world.communicator("gather");
    Stream stream(kHost, "gather");
    float part = 1;
    float whole[3];
    if (world.rank() == 2) {
      sleep(3);
      return "slept";
    }
    comm->all_gather(View(whole, DType::kF32, {3}, kHost), View(&part, DType::kF32, {1}, kHost),
                     stream);
    stream.synchronize();
    return "gathered without rank 2";
  });
  EXPECT_LT(now_seconds() - begin, 8);
  EXPECT_EQ(said[2], "slept");
  // Whoever times out first tells the other one.
  for (const int rank : {0, 1}) {
    EXPECT_NE(said[rank].find("all_gather #1 on \"gather\" (ranks 0, 1, 2): rank 2 did not take"),
              std::string::npos)
        << said[rank];
  }
}

TEST(TcpWorld, SurveyTellsWhoAnswers) {
  const auto said = run_job(3, [](World& world) -> std::string {
    if (world.rank() == 1) {
      sleep(1);
      world.bootstrap().abandon();
      return "slept";
    }
    std::string heard;
    for (const auto& answer : world.bootstrap().survey(message("I am ", world.rank()), 0.5)) {
      heard += answer.value_or("nothing") + ";";
    }
    world.bootstrap().abandon();
    return heard;
  });
  EXPECT_EQ(said[0], "I am 0;nothing;I am 2;");
  EXPECT_EQ(said[2], "I am 0;nothing;I am 2;");
}

TEST(TcpWorld, DifferentCollectivesAreFoundOut) {
  const auto said = run_job(2, [](World& world) -> std::string {
    auto comm = world.communicator("reduce");
    Stream stream(kHost);
    std::vector<float> values(8);
    const int64_t count = world.rank() == 0 ? 4 : 8;
    comm->all_reduce(View(values.data(), DType::kF32, {count}, kHost), Reduction::kSum, stream);
    return "summed";
  });
  EXPECT_NE((said[0] + said[1]).find("ranks issue different collectives"), std::string::npos)
      << said[0] << "\n"
      << said[1];
}

}  // namespace
}  // namespace rowshard
