#pragma once

#include <frugal/detail/background_writer.hpp>
#include <frugal/detail/checkpoint_directory.hpp>
#include <frugal/detail/checkpoint_measured.hpp>
#include <frugal/detail/checkpoint_snapshot.hpp>
#include <frugal/detail/directory_lock.hpp>
#include <frugal/detail/safetensors.hpp>
#include <frugal/detail/state_archive.hpp>
#include <frugal/detail/storage_local.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

inline std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) { return known.what_without_backtrace(); } catch (const std::exception& known) {
    return known.what();
  } catch (...) { return "unknown error"; }
}

// The files of one run in one directory. Lives on the heap: the writer's thread refers to it while its manager is moved.
template <class Storage>
class CheckpointStore {
 public:
  using Path = std::filesystem::path;
  struct Found {
    Path path;
    State state;
  };

  CheckpointStore(Path directory, Retention retention, Storage storage)
      : directory_(std::move(directory)), retention_(retention), storage_(std::move(storage)) {}
  CheckpointStore(const CheckpointStore&) = delete;
  ~CheckpointStore() {
    settle();
    if (error_) TORCH_WARN("CheckpointManager: the last checkpoint was not written: ", text_of(error_));
  }

  const Path& directory() const { return directory_; }
  // Until nothing is in flight; the error of the writer is kept for wait().
  void settle() {
    if (const std::exception_ptr error = writer_.take_error()) error_ = error;
  }
  void wait() {
    settle();
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

  // The right to write. Returns the number of the newest file that nobody here knows; 0: there is none.
  std::int64_t lock() {
    if (lock_) return 0;
    DirectoryLock held(directory_);
    remove_dead_temporaries(directory_);
    const auto files = checkpoint_files(directory_);
    newest_ = files.empty() ? 0 : *checkpoint_number(files.back());
    if (newest_ <= seen_) lock_.emplace(std::move(held));
    return newest_ <= seen_ ? 0 : newest_;
  }
  // Accepts what is there: as files of this run, or as files to be removed once a new one is durable.
  void take_over(bool keep) {
    if (!keep) first_own_ = newest_ + 1;
    seen_ = newest_;
    lock();
  }

  // The files there are another run's from now on.
  void disown() {
    settle();
    lock_.reset();
    seen_ = 0;
  }

  // Copies `state` and writes the copy, now or in the background. One write in flight: call wait() before.
  void write(const State& state, bool in_background) {
    snapshot_.take(state);
    const std::int64_t number = ++newest_;  // never again, even if this one fails
    if (in_background) writer_.submit([this, number] { write_snapshot(number); });
    else write_snapshot(number);
  }

  // The newest sound checkpoint. None although there are files: an error, never a silent fresh start.
  std::optional<Found> newest() {
    std::vector<Path> files = checkpoint_files(directory_);
    seen_ = files.empty() ? 0 : *checkpoint_number(files.back());
    std::ranges::reverse(files);
    return first_sound(files, [](const DocumentReader& file) { return read_state(file, [](auto) { return true; }); });
  }
  // The weights that the metric of the best one was measured on; nothing when no file has a metric that counts.
  std::optional<Found> best() {
    const auto all = known();
    std::vector<Path> files;
    for (const auto& found : best_checkpoints(all, retention_.goal)) files.push_back(found.path);
    if (files.empty() && std::ranges::none_of(all, &CheckpointInfo::valid))
      for (const auto& damaged : all) files.push_back(damaged.path);
    return first_sound(files, [](const DocumentReader& file) {
      file.verify();
      const auto measured = measured_in(file.metadata());
      return read_state(file,
                        [&](std::string_view name) { return name.starts_with("model/") || measured.contains(name); });
    });
  }

 private:
  // The files, newest last. One that a restore found damaged is not valid, whatever its header says.
  std::vector<CheckpointInfo> known() const {
    auto all = list_checkpoints(directory_);
    for (auto& found : all) found.valid = found.valid && !damaged_.contains(found.path);
    return all;
  }

  std::optional<Found> first_sound(const std::vector<Path>& files, auto&& read) {
    std::string problems;
    for (const Path& path : files) {
      try {
        Found found{path, read(DocumentReader(path))};
        if (!problems.empty())
          TORCH_WARN("CheckpointManager: falling back to '", path.string(), "'. Damaged:", problems);
        return found;
      } catch (const DamagedFile& damage) {
        damaged_.insert(path);
        problems += std::string("\n  ") + damage.what();
      }
    }
    TORCH_CHECK(files.empty(), "CheckpointManager: there are checkpoints in '", directory_.string(),
                "', but none is valid. Bring one back from a backup, or start afresh in another directory.", problems);
    return std::nullopt;
  }

  void write_snapshot(std::int64_t number) {
    auto file = storage_.create(checkpoint_path(directory_, number));
    write_document(snapshot_.document(), file);
    file.commit();
    prune();
  }

  // Only after a commit. Tries to remove everything that may go; the first error surfaces, and nothing is lost by it.
  void prune() {
    std::vector<CheckpointInfo> own;
    std::vector<Path> going;
    for (auto& found : known()) {
      if (*checkpoint_number(found.path) < first_own_) going.push_back(found.path);
      else own.push_back(std::move(found));
    }
    for (Path& path : superseded(own, retention_)) going.push_back(std::move(path));
    std::exception_ptr error;
    for (const Path& path : going) {
      try {
        storage_.remove(path);
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  }

  Path directory_;
  Retention retention_;
  Storage storage_;
  std::optional<DirectoryLock> lock_;
  std::int64_t newest_ = 0;     // number of the newest file, once the lock is held
  std::int64_t seen_ = 0;       // files up to here were offered to restore(), or were accepted
  std::int64_t first_own_ = 0;  // files below are of a run that is to be discarded
  std::set<Path> damaged_;
  CheckpointSnapshot snapshot_;
  std::exception_ptr error_;
  BackgroundWriter writer_;  // last: it refers to everything else
};

}  // namespace frugal::inline v0::detail
