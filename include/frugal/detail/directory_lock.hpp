#pragma once

#include <frugal/detail/durable_directory.hpp>
#include <frugal/detail/file_descriptor.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace frugal::inline v0::detail {

inline constexpr std::string_view lock_file_name = ".frugal.lock";

// The right to write into a directory: one at a time, between processes and inside one. Makes the directory. It is an
// flock on <directory>/.frugal.lock, so it ends with the process, however that ends; the file stays, with the name of
// its last owner. A fork() without exec() shares it. File systems that have no locks grant it to everybody.
class DirectoryLock {
 public:
  // std::runtime_error: somebody else writes there. std::system_error: no file can be made there.
  explicit DirectoryLock(const std::filesystem::path& directory) {
    make_directory(directory);
    const std::filesystem::path path = directory / lock_file_name;
    file_ = FileDescriptor(path, O_RDWR | O_CREAT);
    if (!file_.is_open()) throw_file_error("CheckpointManager", "open", path);
    if (uninterrupted([&] { return ::flock(file_.get(), LOCK_EX | LOCK_NB); }) != 0 && errno == EWOULDBLOCK)
      throw std::runtime_error(
          "CheckpointManager: '" + directory.string() + "' is in use: " + owner() +
          " writes checkpoints there. Give each run a directory of its own, or end the other one.");
    note_owner();
  }
  DirectoryLock(DirectoryLock&&) noexcept = default;
  DirectoryLock& operator=(DirectoryLock&&) = delete;
  ~DirectoryLock() {
    if (file_.is_open()) ::flock(file_.get(), LOCK_UN);  // closing is not enough while a forked child has it open
  }

 private:
  std::string owner() const {
    std::array<char, 200> text{};
    const std::int64_t size = file_.read_at(0, std::as_writable_bytes(std::span(text)));
    const std::string_view all(text.data(), static_cast<std::size_t>(std::max<std::int64_t>(size, 0)));
    const std::string_view line = all.substr(0, all.find('\n'));
    return line.empty() ? "another manager" : std::string(line);
  }

  // For the error of the next one; it does not matter if it fails.
  void note_owner() const {
    std::array<char, 65> host{};
    if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
    const std::string text = "process " + std::to_string(::getpid()) + " on " + host.data() + "\n";
    if (::ftruncate(file_.get(), 0) == 0) static_cast<void>(file_.write_all(std::as_bytes(std::span(text))));
  }

  FileDescriptor file_;
};

}  // namespace frugal::inline v0::detail
