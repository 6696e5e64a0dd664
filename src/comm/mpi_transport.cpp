// The C interface only.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <chrono>
#include <thread>
#include <vector>

#include "comm/host_engine.h"
#include "comm/transport.h"

namespace rowshard {
namespace {

constexpr int64_t kChunk = int64_t{1} << 30;  // a count is an int
constexpr int kAbortTag = 0;
constexpr int kTagsPerChannel = 256;
constexpr int kNoticeBytes = 1024;
// How long a failing rank lets its peers read why, before MPI kills them.
constexpr double kNoticeSeconds = 1.0;

void mpi_check(int status, const char* what) {
  if (status == MPI_SUCCESS)
    return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(status, text, &length);
  throw CommError(message(what, " failed: ", std::string(text, length)));
}

class MpiTransfer : public Transfer {
 public:
  MpiTransfer(int peer, bool sending, int64_t bytes)
      : peer_(peer), sending_(sending), bytes_(bytes) {}
  ~MpiTransfer() override {
    // Only after a failure: memory that is about to go away must not be written any more.
    for (MPI_Request& request : requests_) {
      if (request == MPI_REQUEST_NULL)
        continue;
      MPI_Cancel(&request);
      MPI_Request_free(&request);
    }
  }

  MPI_Request* add() { return &requests_.emplace_back(MPI_REQUEST_NULL); }

  bool test() override {
    int done = 0;
    states_.resize(requests_.size());
    const int status =
        MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, states_.data());
    if (status == MPI_ERR_IN_STATUS) {
      for (const MPI_Status& state : states_) {
        if (state.MPI_ERROR == MPI_ERR_TRUNCATE)
          throw mismatch("more");
        if (state.MPI_ERROR != MPI_ERR_PENDING)
          mpi_check(state.MPI_ERROR, "message");
      }
    }
    if (status == MPI_ERR_TRUNCATE)
      throw mismatch("more");
    mpi_check(status, "MPI_Testall");
    if (!done)
      return false;
    if (!sending_) {
      int64_t received = 0;
      for (const MPI_Status& state : states_) {
        int count = 0;
        MPI_Get_count(&state, MPI_BYTE, &count);
        received += count;
      }
      if (received != bytes_)
        throw mismatch(message(received));
    }
    return true;
  }

 private:
  CommError mismatch(const std::string& got) const {
    return CommError(message("rank ", peer_, " sent ", got, " bytes where ", bytes_,
                             " are due: ranks issue different collectives, or with other shapes"));
  }

  int peer_;
  bool sending_;
  int64_t bytes_;
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> states_;
};

class MpiTransport : public Transport {
 public:
  MpiTransport(int rank, int size, MPI_Comm comm) : Transport(rank, size), comm_(comm) {
    int* upper = nullptr;
    int found = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &upper, &found);
    if (found)
      largest_tag_ = *upper;
    mpi_check(MPI_Irecv(notice_, kNoticeBytes, MPI_BYTE, MPI_ANY_SOURCE, kAbortTag, comm_,
                        &notice_request_),
              "MPI_Irecv");
  }

  std::unique_ptr<Transfer> send(int peer, int channel, int64_t sequence, const std::byte* data,
                                 int64_t bytes) override {
    auto transfer = std::make_unique<MpiTransfer>(peer, true, bytes);
    for (int64_t at = 0; at < bytes; at += kChunk) {
      const int count = static_cast<int>(std::min(kChunk, bytes - at));
      mpi_check(MPI_Isend(data + at, count, MPI_BYTE, peer, tag(channel, sequence), comm_,
                          transfer->add()),
                "MPI_Isend");
    }
    return transfer;
  }

  std::unique_ptr<Transfer> receive(int peer, int channel, int64_t sequence, std::byte* data,
                                    int64_t bytes) override {
    auto transfer = std::make_unique<MpiTransfer>(peer, false, bytes);
    for (int64_t at = 0; at < bytes; at += kChunk) {
      const int count = static_cast<int>(std::min(kChunk, bytes - at));
      mpi_check(MPI_Irecv(data + at, count, MPI_BYTE, peer, tag(channel, sequence), comm_,
                          transfer->add()),
                "MPI_Irecv");
    }
    return transfer;
  }

  void check_peers() override {
    if (!peer_failure_.empty())
      throw CommError(peer_failure_);
    int arrived = 0;
    MPI_Status status;
    mpi_check(MPI_Test(&notice_request_, &arrived, &status), "MPI_Test");
    if (!arrived)
      return;
    int count = 0;
    MPI_Get_count(&status, MPI_BYTE, &count);
    peer_failure_.assign(reinterpret_cast<const char*>(notice_), count);
    throw CommError(peer_failure_);
  }

  void abort(const std::string& why) override {
    if (peer_failure_.empty()) {
      const std::string text = notice(why).substr(0, kNoticeBytes);
      std::vector<MPI_Request> sends(size(), MPI_REQUEST_NULL);
      for (int peer = 0; peer < size(); ++peer) {
        if (peer == rank())
          continue;
        MPI_Isend(text.data(), static_cast<int>(text.size()), MPI_BYTE, peer, kAbortTag, comm_,
                  &sends[peer]);
      }
      const Deadline deadline(kNoticeSeconds);
      while (!deadline.passed()) {  // peers print, and mostly get here too, before they are killed
        int done = 0;
        MPI_Testall(static_cast<int>(sends.size()), sends.data(), &done, MPI_STATUSES_IGNORE);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    } else {
      std::this_thread::sleep_for(std::chrono::duration<double>(2 * kNoticeSeconds));
    }
    MPI_Abort(MPI_COMM_WORLD, 1);
  }

  void close() override {
    MPI_Cancel(&notice_request_);
    MPI_Request_free(&notice_request_);
    MPI_Comm_free(&comm_);
    MPI_Finalize();
  }

 private:
  int tag(int channel, int64_t sequence) const {
    const int64_t tag = 1 + int64_t{kTagsPerChannel} * channel + sequence % kTagsPerChannel;
    ROWSHARD_CHECK(tag <= largest_tag_, LogicError, "communicator ", channel,
                   " is more than this MPI has tags for (", largest_tag_, ")");
    return static_cast<int>(tag);
  }

  MPI_Comm comm_;
  int largest_tag_ = 32767;  // the least that the standard promises
  std::byte notice_[kNoticeBytes];
  MPI_Request notice_request_ = MPI_REQUEST_NULL;
  std::string peer_failure_;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(const LaunchEnvironment& launch, double timeout) {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  ROWSHARD_CHECK(!finalized, LogicError, "MPI was finalised: a process makes one World");
  if (!initialized) {
    int provided = 0;
    mpi_check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init");
  }
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank != launch.rank || size != launch.world_size) {
    char library[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(library, &length);
    throw ConfigError(message(to_string(launch.launcher), " says rank ", launch.rank, " of ",
                              launch.world_size, ", but MPI says rank ", rank, " of ", size,
                              "; this binary is linked with ", std::string(library, length),
                              ": start it with that library's mpirun, with torchrun or srun"));
  }
  // Our own copy: errors come back as codes, and tags are ours alone.
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_check(MPI_Comm_idup(MPI_COMM_WORLD, &comm, &request), "MPI_Comm_idup");
  const Deadline deadline(timeout);
  Backoff backoff;
  for (int done = 0; !done; backoff.pause()) {
    mpi_check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    ROWSHARD_CHECK(!deadline.passed(), CommTimeout, "start-up: not all of ", size,
                   " ranks came within ", timeout, " s");
  }
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  return std::make_unique<MpiTransport>(rank, size, comm);
}

}  // namespace rowshard
