#include "comm/tcp_rendezvous.h"

#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>

#include "comm/host_engine.h"

namespace rowshard {
namespace {

constexpr int kPortsTried = 8;
constexpr uint64_t kMagic = 0x3164726168737772;  // "rwshard1"
constexpr double kHelloSeconds = 1;              // what answers no faster is not one of us

struct Hello {
  uint64_t magic;
  uint64_t job;
  int32_t rank;
  int32_t size;
  int32_t port;  // where this rank listens for ranks above it
  int32_t unused;
};

enum class Answer : int32_t { kWelcome, kTable, kRefused };
struct AnswerHeader {
  uint64_t magic;
  Answer answer;
  int32_t bytes;  // of the text that follows
};

uint64_t job_hash(const std::string& job_id) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : job_id)
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

bool send_answer(const Socket& socket, Answer answer, const std::string& text,
                 const Deadline& deadline) {
  const AnswerHeader header{kMagic, answer, static_cast<int32_t>(text.size())};
  return socket.write(&header, sizeof(header), deadline) &&
         socket.write(text.data(), text.size(), deadline);
}

/// False when nothing of ours came.
bool read_answer(const Socket& socket, AnswerHeader& header, std::string& text,
                 const Deadline& deadline) {
  if (!socket.read(&header, sizeof(header), deadline) || header.magic != kMagic)
    return false;
  text.resize(static_cast<size_t>(header.bytes));
  return socket.read(text.data(), text.size(), deadline);
}

std::vector<int> missing(const std::vector<Socket>& sockets, int first) {
  std::vector<int> ranks;
  for (int rank = first; rank < static_cast<int>(sockets.size()); ++rank) {
    if (!sockets[rank])
      ranks.push_back(rank);
  }
  return ranks;
}

class Rendezvous {
 public:
  Rendezvous(const LaunchEnvironment& launch, double timeout)
      : launch_(launch),
        deadline_(timeout),
        job_(job_hash(launch.job_id)),
        sockets_(static_cast<size_t>(launch.world_size)) {}

  std::vector<Socket> run() {
    auto listener = listen_on(0);
    ROWSHARD_CHECK(listener.has_value(), CommError, "rank ", launch_.rank,
                   ": cannot listen on any port: ", std::strerror(errno));
    const std::string table = launch_.rank == 0 ? serve() : join(listener->local_port());
    connect_to_lower_ranks(table);
    accept_higher_ranks(*listener);
    return std::move(sockets_);
  }

 private:
  Hello hello(int port) const { return {kMagic, job_, launch_.rank, launch_.world_size, port, 0}; }

  /// Rank 0: waits for everybody, then tells everybody where everybody listens.
  std::string serve() {
    std::optional<Socket> listener;
    int port = launch_.master_port;
    for (; port < launch_.master_port + kPortsTried && !listener; ++port)
      listener = listen_on(port);
    ROWSHARD_CHECK(listener.has_value(), CommError, "rank 0: ports ", launch_.master_port, " to ",
                   launch_.master_port + kPortsTried - 1,
                   " are all taken; set ROWSHARD_PORT to a free one, the same on every rank");
    std::vector<int> ports(sockets_.size());
    while (!missing(sockets_, 1).empty()) {
      if (!listener->readable(deadline_))
        give_up(port - 1);
      Socket socket = listener->accept();
      Hello theirs{};
      const Deadline hello_deadline(kHelloSeconds);
      if (!socket || !socket.read(&theirs, sizeof(theirs), hello_deadline) ||
          theirs.magic != kMagic || theirs.job != job_) {
        continue;  // somebody else's
      }
      const bool fits = theirs.size == launch_.world_size && theirs.rank > 0 &&
                        theirs.rank < theirs.size &&
                        (!sockets_[theirs.rank] || sockets_[theirs.rank].hung_up());
      if (!fits) {
        refuse(socket, message("rank ", theirs.rank, " of ", theirs.size, " came to a job of ",
                               launch_.world_size, " ranks, or came twice"));
      }
      if (!send_answer(socket, Answer::kWelcome, "", hello_deadline))
        continue;
      ports[theirs.rank] = theirs.port;
      sockets_[theirs.rank] = std::move(socket);
    }
    std::ostringstream table;
    for (size_t rank = 1; rank < sockets_.size(); ++rank) {
      table << sockets_[rank].peer_address() << ' ' << ports[rank] << '\n';
    }
    for (size_t rank = 1; rank < sockets_.size(); ++rank) {
      ROWSHARD_CHECK(send_answer(sockets_[rank], Answer::kTable, table.str(), deadline_), CommError,
                     "rank ", rank, " went away during start-up");
    }
    return table.str();
  }

  [[noreturn]] void refuse(const Socket& newcomer, const std::string& why) {
    send_answer(newcomer, Answer::kRefused, why, Deadline(kHelloSeconds));
    tell_all(why);
    throw ConfigError(why);
  }
  [[noreturn]] void give_up(int port) {
    const std::string why =
        message("start-up: ", rank_list(missing(sockets_, 1)), " of ", launch_.world_size,
                " did not come to rank 0 at ", launch_.master_addr, ":", port, " within ",
                deadline_.seconds(), " s");
    tell_all(why);
    throw CommTimeout(why);
  }
  void tell_all(const std::string& why) {
    for (const Socket& socket : sockets_) {
      if (socket)
        send_answer(socket, Answer::kRefused, why, Deadline(kHelloSeconds));
    }
  }

  /// Other ranks: find rank 0, say where this rank listens, and wait for the table.
  std::string join(int own_port) {
    std::string error = "nobody of this job answers there";
    for (int attempt = 0; !deadline_.passed(); ++attempt) {
      const int port = launch_.master_port + attempt % kPortsTried;
      Socket socket = connect_to(launch_.master_addr, port, deadline_, error);
      AnswerHeader header{};
      std::string text;
      const Hello ours = hello(own_port);
      const Deadline hello_deadline(std::min(kHelloSeconds, deadline_.remaining()));
      if (!socket || !socket.write(&ours, sizeof(ours), hello_deadline) ||
          !read_answer(socket, header, text, hello_deadline)) {
        if (attempt % kPortsTried == kPortsTried - 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        continue;
      }
      ROWSHARD_CHECK(header.answer == Answer::kWelcome, ConfigError, text);
      // Rank 0's own deadline decides; a little more, so that its reason arrives.
      const Deadline table_deadline(deadline_.remaining() + kHelloSeconds);
      ROWSHARD_CHECK(read_answer(socket, header, text, table_deadline), CommError, "rank ",
                     launch_.rank, ": rank 0 at ", launch_.master_addr, ":", port,
                     " went away during start-up");
      ROWSHARD_CHECK(header.answer == Answer::kTable, CommTimeout, text);
      sockets_[0] = std::move(socket);
      return text;
    }
    throw CommTimeout(message(
        "start-up: rank ", launch_.rank, " did not find rank 0 at ", launch_.master_addr, ":",
        launch_.master_port, " … ", launch_.master_port + kPortsTried - 1, " within ",
        deadline_.seconds(), " s (", error,
        "); is rank 0 running, MASTER_ADDR its node, and the port open? ROWSHARD_PORT sets it"));
  }

  void connect_to_lower_ranks(const std::string& table) {
    std::istringstream lines(table);
    for (int peer = 1; peer < launch_.rank; ++peer) {
      std::string address;
      int port = 0;
      lines >> address >> port;
      // A rank that rank 0 sees on its loopback is on rank 0's node: at the address of rank 0.
      if (address == kLoopback) {
        const std::string seen = sockets_[0].peer_address();
        address = seen == kLoopback ? launch_.master_addr : seen;
      }
      std::string error = "it closed the connection";
      Socket socket = connect_to(address, port, deadline_, error);
      const Hello ours = hello(0);
      ROWSHARD_CHECK(socket && socket.write(&ours, sizeof(ours), deadline_), CommError,
                     "start-up: rank ", launch_.rank, " cannot reach rank ", peer, " at ", address,
                     ":", port, " (", error,
                     "); every rank must be able to connect to every other");
      sockets_[peer] = std::move(socket);
    }
  }

  void accept_higher_ranks(const Socket& listener) {
    for (;;) {
      const std::vector<int> absent = missing(sockets_, launch_.rank + 1);
      if (absent.empty())
        return;
      ROWSHARD_CHECK(listener.readable(deadline_), CommTimeout, "start-up: ", rank_list(absent),
                     " did not connect to rank ", launch_.rank, " within ", deadline_.seconds(),
                     " s");
      Socket socket = listener.accept();
      Hello theirs{};
      const Deadline hello_deadline(kHelloSeconds);
      if (socket && socket.read(&theirs, sizeof(theirs), hello_deadline) &&
          theirs.magic == kMagic && theirs.job == job_ && theirs.rank > launch_.rank &&
          theirs.rank < launch_.world_size) {
        sockets_[theirs.rank] = std::move(socket);
      }
    }
  }

  const LaunchEnvironment& launch_;
  Deadline deadline_;
  uint64_t job_;
  std::vector<Socket> sockets_;
};

}  // namespace

std::vector<Socket> tcp_rendezvous(const LaunchEnvironment& launch, double timeout) {
  return Rendezvous(launch, timeout).run();
}

}  // namespace rowshard
