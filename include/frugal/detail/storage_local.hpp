#pragma once

#include <frugal/detail/durable_directory.hpp>
#include <frugal/detail/file_descriptor.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace frugal::inline v0 {

/// A storage of local files, the default of CheckpointManager. Whoever stores elsewhere writes a class with the same
/// verbs:
///
///     auto file = storage.create(target);   // a File that can be moved; nothing is visible under `target` yet
///     file.write(bytes);                    // any number of times, std::span<const std::byte>
///     file.commit();                        // now it is there, complete and durable, in place of what was there
///     storage.remove(path);                 // once it is not wanted any more
///
/// A file that is destroyed without a commit leaves nothing behind, and `target` as it was. Every verb throws when it
/// cannot do its work; here std::system_error, with the path. Copies are the same storage. The verbs of one file belong
/// to one thread at a time.
class LocalFiles {
 public:
  /// A file on its way: a hidden temporary beside its target, named .<target>.<process>.<number>.tmp, until commit().
  class File {
   public:
    File(File&& other) noexcept
        : target_(std::move(other.target_)),
          temporary_(std::exchange(other.temporary_, {})),
          file_(std::move(other.file_)) {}
    File& operator=(File&&) = delete;
    ~File() {
      if (!temporary_.empty()) ::unlink(temporary_.c_str());
    }

    /// Appends all of `bytes`, or throws.
    void write(std::span<const std::byte> bytes) {
      if (!file_.write_all(bytes)) detail::throw_file_error("LocalFiles", "write", temporary_);
    }

    /// Makes the file durable, then visible, then its name durable: fsync, rename, fsync of the directory. Once only.
    /// If it throws before the rename, the target is as it was; if it throws after it (the last fsync failed), the new
    /// file is in place but might be gone after a power failure.
    void commit() {
      if (temporary_.empty())
        throw std::invalid_argument("LocalFiles: '" + target_.string() + "' has been committed already.");
      if (!file_.sync()) detail::throw_file_error("LocalFiles", "make durable", temporary_);
      if (std::rename(temporary_.c_str(), target_.c_str()) != 0)
        detail::throw_file_error("LocalFiles", "rename to", target_);
      temporary_.clear();
      file_.close();
      detail::sync_directory(target_.parent_path());
    }

   private:
    friend class LocalFiles;
    explicit File(const std::filesystem::path& target) : target_(target) {
      static std::atomic<std::uint64_t> number = 0;  // two threads, or two files of one target, never share a temporary
      do {
        temporary_ = target_.parent_path() / ("." + target_.filename().string() + "." + std::to_string(::getpid()) +
                                              "." + std::to_string(++number) + ".tmp");
        file_ = detail::FileDescriptor(temporary_, O_WRONLY | O_CREAT | O_EXCL);
      } while (!file_.is_open() ? errno == EEXIST : !claimed());
      if (file_.is_open()) return;
      const std::filesystem::path failed = std::exchange(temporary_, {});
      detail::throw_file_error("LocalFiles", "create", failed);
    }

    // Locks the temporary: that is how others see that its writer lives. False: somebody who clears up dead temporaries
    // was faster, and has removed it.
    bool claimed() const {
      if (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) return errno != EWOULDBLOCK;  // a file system without locks
      struct stat status{};
      return ::fstat(file_.get(), &status) != 0 || status.st_nlink > 0;
    }

    std::filesystem::path target_, temporary_;  // temporary_ is empty after the rename
    detail::FileDescriptor file_;
  };

  /// Starts a file that will be at `target`. Makes the directories that are missing.
  File create(const std::filesystem::path& target) {
    detail::make_directory(target.parent_path());
    return File(target);
  }

  /// Removes a file. One that is not there is no error.
  void remove(const std::filesystem::path& path) {
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) detail::throw_file_error("LocalFiles", "remove", path);
  }
};

namespace detail {

// Removes the temporaries in `directory` whose writers are dead: those that nobody holds a lock on. Returns how many.
inline int remove_dead_temporaries(const std::filesystem::path& directory) {
  int removed = 0;
  std::error_code error;  // a directory that is not there, or goes away, has no temporaries
  for (std::filesystem::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with('.') || !name.ends_with(".tmp") || name.find(".safetensors.") == std::string::npos) continue;
    const FileDescriptor file(at->path(), O_RDWR | O_NOFOLLOW | O_NONBLOCK);
    if (file.is_open() && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0 && ::unlink(at->path().c_str()) == 0) ++removed;
  }
  return removed;
}

}  // namespace detail
}  // namespace frugal::inline v0
