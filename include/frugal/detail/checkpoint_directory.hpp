#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <frugal/policy.hpp>

namespace frugal::inline v0 {

/// One checkpoint file.
struct CheckpointInfo {
  std::filesystem::path path;
  Progress progress;         ///< where the run stood; as new if the file is not valid
  std::uint64_t bytes = 0;   ///< size of the file
  bool valid = false;        ///< size and header are right; the tensors are verified by a restore
  std::string problem;       ///< why it is not valid
};

namespace detail {

// Progress as metadata: "progress.epoch", "progress.micro_batch", ...; doubles exact.
void write_progress(const Progress& progress, std::map<std::string, std::string>& metadata);
Progress read_progress(const std::map<std::string, std::string>& metadata);  // DamagedFile

// Files are named checkpoint-00000012.safetensors; the number only grows.
std::filesystem::path checkpoint_path(const std::filesystem::path& directory, std::int64_t number);
std::optional<std::int64_t> checkpoint_number(const std::filesystem::path& path);  // nullopt: none of ours

// Newest last. A directory that is not there has none.
std::vector<std::filesystem::path> checkpoint_files(const std::filesystem::path& directory);
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& directory);  // reads headers
CheckpointInfo inspect_checkpoint(const std::filesystem::path& path);

struct Retention {
  std::int64_t keep_last = 2, keep_best = 1;
  Goal goal = Goal::minimize;
};
// The valid ones whose metric counts, best first; ties: the older one first.
std::vector<CheckpointInfo> best_checkpoints(const std::vector<CheckpointInfo>& all, Goal goal);
// What may be removed once the newest of `all` is durable. `all`: newest last.
std::vector<std::filesystem::path> superseded(const std::vector<CheckpointInfo>& all, const Retention& retention);

// The right to write into a directory; makes the directory. Released by the destructor or the end of the process, however
// it ends. std::runtime_error: somebody else has it, also in this process. Movable.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::filesystem::path& directory);
};

// Temporaries whose writers are dead. To be called with the lock in hand.
void remove_dead_temporaries(const std::filesystem::path& directory);

}  // namespace detail
}  // namespace frugal::inline v0
