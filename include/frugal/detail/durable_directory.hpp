#pragma once

#include <frugal/detail/file_descriptor.hpp>

#include <fcntl.h>
#include <cerrno>
#include <filesystem>
#include <system_error>

namespace frugal::inline v0::detail {

// Makes the names in a directory durable: those that were added, replaced or removed. "" is the current directory.
inline void sync_directory(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory.empty() ? "." : directory;
  const FileDescriptor descriptor(path, O_RDONLY | O_DIRECTORY);
  if (!descriptor.is_open()) throw_file_error("LocalFiles", "open the directory", path);
  // EINVAL: a file system that cannot do this for directories, and does not need it
  if (!descriptor.sync() && errno != EINVAL && errno != ENOTSUP)
    throw_file_error("LocalFiles", "make durable the directory", path);
}

// Makes a directory and those above it that are missing, durably: each name is synced in the directory that holds it.
inline void make_directory(const std::filesystem::path& directory) {
  std::error_code error;
  if (directory.empty() || std::filesystem::is_directory(directory, error)) return;
  const std::filesystem::path path = directory.has_filename() ? directory : directory.parent_path();  // "a/b/" is "a/b"
  make_directory(path.parent_path());
  std::filesystem::create_directory(path, error);  // no error if somebody else was faster
  if (error) {
    errno = error.value();
    throw_file_error("LocalFiles", "make the directory", path);
  }
  sync_directory(path.parent_path());
}

}  // namespace frugal::inline v0::detail
