// Sockets with a deadline, for the TCP transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "comm/watchdog.h"

namespace rowshard {

/// An owned, non-blocking socket. Empty when default-made or moved from.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  void close();

  /// All bytes before the deadline; false when the peer closed or the deadline passed.
  bool read(void* data, size_t bytes, const Deadline& deadline) const;
  bool write(const void* data, size_t bytes, const Deadline& deadline) const;
  /// True when there is something to accept or read before the deadline.
  bool readable(const Deadline& deadline) const;
  /// The other side has closed or died.
  bool hung_up() const;
  Socket accept() const;  // empty when nobody is there
  /// Address of the other side, as digits; "loopback" for any form of it.
  std::string peer_address() const;
  int local_port() const;

 private:
  int fd_ = -1;
};

inline constexpr const char* kLoopback = "loopback";

/// Listens on all interfaces; port 0 takes any. nullopt when the port is taken.
std::optional<Socket> listen_on(int port);
/// Connects, or says why not in `error`.
Socket connect_to(const std::string& host, int port, const Deadline& deadline, std::string& error);

}  // namespace rowshard
