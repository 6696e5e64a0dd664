#include "comm/tcp_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace rowshard {
namespace {

bool wait_for(int fd, short events, const Deadline& deadline) {
  pollfd entry{fd, events, 0};
  const int milliseconds = static_cast<int>(deadline.remaining() * 1000) + 1;
  return !deadline.passed() && poll(&entry, 1, milliseconds) > 0;
}

void prepare(int fd) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

int Socket::release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

void Socket::close() {
  if (fd_ >= 0)
    ::close(fd_);
  fd_ = -1;
}

bool Socket::read(void* data, size_t bytes, const Deadline& deadline) const {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = recv(fd_, at, bytes, 0);
    if (got > 0) {
      at += got;
      bytes -= static_cast<size_t>(got);
    } else if (got == 0 || !would_block() || !wait_for(fd_, POLLIN, deadline)) {
      return false;
    }
  }
  return true;
}

bool Socket::write(const void* data, size_t bytes, const Deadline& deadline) const {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = send(fd_, at, bytes, MSG_NOSIGNAL);
    if (put > 0) {
      at += put;
      bytes -= static_cast<size_t>(put);
    } else if (!would_block() || !wait_for(fd_, POLLOUT, deadline)) {
      return false;
    }
  }
  return true;
}

bool Socket::readable(const Deadline& deadline) const {
  return wait_for(fd_, POLLIN, deadline);
}

bool Socket::hung_up() const {
  pollfd entry{fd_, POLLRDHUP, 0};
  return poll(&entry, 1, 0) > 0;
}

Socket Socket::accept() const {
  Socket socket(::accept(fd_, nullptr, nullptr));
  if (socket)
    prepare(socket.fd());
  return socket;
}

std::string Socket::peer_address() const {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  char text[NI_MAXHOST] = "";
  if (getpeername(fd_, reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&address), length, text, sizeof(text), nullptr, 0,
                  NI_NUMERICHOST) != 0) {
    return "";
  }
  std::string digits = text;
  if (digits.starts_with("::ffff:"))
    digits = digits.substr(7);  // IPv4 on an IPv6 socket
  return digits.starts_with("127.") || digits == "::1" ? kLoopback : digits;
}

int Socket::local_port() const {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
  return address.ss_family == AF_INET6 ? ntohs(reinterpret_cast<sockaddr_in6&>(address).sin6_port)
                                       : ntohs(reinterpret_cast<sockaddr_in&>(address).sin_port);
}

std::optional<Socket> listen_on(int port) {
  // One socket for IPv6 and IPv4; plain IPv4 where the kernel has no IPv6.
  for (const int family : {AF_INET6, AF_INET}) {
    Socket socket(::socket(family, SOCK_STREAM, 0));
    if (!socket)
      continue;
    const int on = 1;
    const int off = 0;
    setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    int bound = -1;
    if (family == AF_INET6) {
      setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
      sockaddr_in6 any{};
      any.sin6_family = AF_INET6;
      any.sin6_port = htons(static_cast<uint16_t>(port));
      bound = bind(socket.fd(), reinterpret_cast<sockaddr*>(&any), sizeof(any));
    } else {
      sockaddr_in any{};
      any.sin_family = AF_INET;
      any.sin_port = htons(static_cast<uint16_t>(port));
      bound = bind(socket.fd(), reinterpret_cast<sockaddr*>(&any), sizeof(any));
    }
    if (bound == 0 && listen(socket.fd(), SOMAXCONN) == 0) {
      prepare(socket.fd());
      return socket;
    }
    if (errno == EADDRINUSE || errno == EACCES)
      return std::nullopt;
  }
  return std::nullopt;
}

Socket connect_to(const std::string& host, int port, const Deadline& deadline, std::string& error) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) {
    error = message("cannot resolve ", host, ": ", gai_strerror(status));
    return {};
  }
  Socket result;
  for (const addrinfo* entry = found; entry && !result; entry = entry->ai_next) {
    Socket socket(::socket(entry->ai_family, SOCK_STREAM, 0));
    if (!socket)
      continue;
    prepare(socket.fd());
    int failure = 0;
    if (connect(socket.fd(), entry->ai_addr, entry->ai_addrlen) != 0) {
      failure = errno;
      if (failure == EINPROGRESS) {
        socklen_t length = sizeof(failure);
        failure = ETIMEDOUT;
        if (wait_for(socket.fd(), POLLOUT, deadline)) {
          getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &failure, &length);
        }
      }
    }
    if (failure == 0) {
      result = std::move(socket);
    } else {
      error = std::strerror(failure);
    }
  }
  freeaddrinfo(found);
  return result;
}

}  // namespace rowshard
