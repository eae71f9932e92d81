#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace frugal::inline v0 {

/// Files of a local file system. (class LocalFiles is public: a storage of CheckpointManager.)
class LocalFiles {
 public:
  class File {
   public:
    File(File&&) noexcept;
    ~File();
    void write(std::span<const std::byte> bytes);
    void commit();
  };
  File create(const std::filesystem::path& target);   // makes missing directories
  void remove(const std::filesystem::path& path);     // what is not there is removed already
};

}  // namespace frugal::inline v0
