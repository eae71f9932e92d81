#pragma once

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace frugal::inline v0::detail {

// Throws std::system_error for errno: "who: cannot verb 'path': No space left on device".
[[noreturn]] inline void throw_file_error(std::string_view who, std::string_view verb,
                                          const std::filesystem::path& path) {
  const int error = errno;
  throw std::system_error(error, std::generic_category(),
                          std::string(who) + ": cannot " + std::string(verb) + " '" + path.string() + "'");
}

// Calls a POSIX function until it is not interrupted by a signal.
inline auto uninterrupted(auto&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// An open file, closed at the end.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  // Not open afterwards when it fails, with the reason in errno. Closed in programs that this process starts.
  FileDescriptor(const std::filesystem::path& path, int flags, mode_t mode = 0644)
      : fd_(uninterrupted([&] { return ::open(path.c_str(), flags | O_CLOEXEC, mode); })) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~FileDescriptor() { close(); }

  bool is_open() const { return fd_ >= 0; }
  int get() const { return fd_; }
  void close() noexcept {
    if (fd_ >= 0)
      ::close(std::exchange(fd_, -1));  // never twice, not even after EINTR: the number may be another's by then
  }

  // All of it, or false with the reason in errno.
  bool write_all(std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t written = uninterrupted([&] { return ::write(fd_, bytes.data(), bytes.size()); });
      if (written < 0) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
    return true;
  }
  // Fills `out` from the position `at`; how much was there, or -1 with the reason in errno.
  std::int64_t read_at(std::uint64_t at, std::span<std::byte> out) const {
    std::size_t filled = 0;
    while (filled < out.size()) {
      const std::span<std::byte> rest = out.subspan(filled);
      const ssize_t got =
          uninterrupted([&] { return ::pread(fd_, rest.data(), rest.size(), static_cast<off_t>(at + filled)); });
      if (got < 0) return -1;
      if (got == 0) break;
      filled += static_cast<std::size_t>(got);
    }
    return static_cast<std::int64_t>(filled);
  }
  bool sync() const {
    return uninterrupted([&] { return ::fsync(fd_); }) == 0;
  }

 private:
  int fd_ = -1;
};

}  // namespace frugal::inline v0::detail
