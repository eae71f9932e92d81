#pragma once

#include <frugal/detail/storage_local.hpp>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace frugal::inline v0::testing {

/// What fails, counted from 1 since the storage was made or armed; 0: never.
struct FailingStorageOptions {
  std::int64_t at_create = 0;  ///< the n-th create()
  std::int64_t at_write = 0;   ///< the n-th write(), before a byte of it is written
  std::int64_t at_byte = 0;    ///< the write() that holds the n-th byte of all, after the bytes before it are written
  std::int64_t at_commit = 0;  ///< the n-th commit(), before anything is visible
  std::int64_t at_remove = 0;  ///< the n-th remove()
  std::int64_t times = 1;      ///< how many calls fail from there on, of this verb; std::int64_t's maximum: all of them
};

/// LocalFiles that fail on order, as a full or broken disk would, and that can be held in the middle of a write. Copies
/// share one state and are safe to use from any thread: keep one, give one to the manager.
///
///     frugal::testing::FailingStorage storage({.at_write = 3});
///     frugal::CheckpointManager checkpoints({.directory = folder}, storage);
///     storage.hold();                                  // the writer stops at its next call ...
///     checkpoints.save(progress, model, optimizer);    // ... which must not stop this one
///     storage.wait_until_held();
///     storage.release();                               // before anybody waits for the writer, or it waits for ever
///
/// An injected failure is a std::system_error with ENOSPC that says "injected".
class FailingStorage {
  struct State;

 public:
  /// A file of LocalFiles behind the same gate and the same counters.
  class File {
   public:
    void write(std::span<const std::byte> bytes) {
      const auto [fails, before] = state_->write(bytes.size());
      file_.write(bytes.first(before));
      if (fails) state_->fail("write", target_);
    }
    void commit() {
      if (state_->call(&State::commits)) state_->fail("commit", target_);
      file_.commit();
    }

   private:
    friend class FailingStorage;
    File(LocalFiles::File file, std::filesystem::path target, std::shared_ptr<State> state)
        : file_(std::move(file)), target_(std::move(target)), state_(std::move(state)) {}

    LocalFiles::File file_;
    std::filesystem::path target_;
    std::shared_ptr<State> state_;
  };

  explicit FailingStorage(FailingStorageOptions options = {}) { arm(options); }

  File create(const std::filesystem::path& target) {
    if (state_->call(&State::creates)) state_->fail("create", target);
    return {files_.create(target), target, state_};
  }
  void remove(const std::filesystem::path& path) {
    if (state_->call(&State::removes)) state_->fail("remove", path);
    files_.remove(path);
  }

  /// Fails as `options` say, counting from here on: every counter goes to 0.
  void arm(FailingStorageOptions options) {
    const std::lock_guard lock(state_->mutex);
    state_->creates = {.fails_at = options.at_create};
    state_->writes = {.fails_at = options.at_write};
    state_->bytes = {.fails_at = options.at_byte};
    state_->commits = {.fails_at = options.at_commit};
    state_->removes = {.fails_at = options.at_remove};
    state_->times = options.times, state_->failures = 0;
  }

  /// From now on every verb waits, until release().
  void hold() { set_held(true); }
  void release() { set_held(false); }
  /// Returns when somebody waits in a verb. Not for the thread that holds and writes at once.
  void wait_until_held() const {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [&] { return state_->waiting > 0; });
  }

  /// How often each verb was called since the storage was made or armed, failures included.
  std::int64_t creates() const { return count(state_->creates); }
  std::int64_t writes() const { return count(state_->writes); }
  std::int64_t commits() const { return count(state_->commits); }
  std::int64_t removes() const { return count(state_->removes); }
  /// Bytes that writes were asked for.
  std::int64_t bytes() const { return count(state_->bytes); }
  /// Failures that were injected.
  std::int64_t failures() const {
    const std::lock_guard lock(state_->mutex);
    return state_->failures;
  }

 private:
  struct Counter {
    std::int64_t fails_at = 0, count = 0, failed = 0;

    // Counts `by` more. True: `fails_at` is among them, or was before and has not failed `times` times.
    bool add(std::int64_t by, std::int64_t times) {
      count += by;
      if (fails_at <= 0 || count < fails_at || failed >= times) return false;
      return ++failed, true;
    }
  };
  struct Cut {
    bool fails;
    std::size_t before;  // what is written before the failure
  };

  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    Counter creates, writes, bytes, commits, removes;
    std::int64_t times = 1, failures = 0, waiting = 0;
    bool held = false;

    std::unique_lock<std::mutex> pass_gate() {
      std::unique_lock lock(mutex);
      ++waiting;
      changed.notify_all();
      changed.wait(lock, [this] { return !held; });
      --waiting;
      return lock;
    }
    bool call(Counter State::* verb) {
      const auto lock = pass_gate();
      return (this->*verb).add(1, times);
    }
    Cut write(std::size_t size) {
      const auto lock = pass_gate();
      const std::int64_t before = bytes.count;
      const bool at_byte = bytes.add(static_cast<std::int64_t>(size), times);
      if (writes.add(1, times)) return {true, 0};
      if (!at_byte) return {false, size};
      return {true, static_cast<std::size_t>(std::max<std::int64_t>(bytes.fails_at - 1 - before, 0))};
    }
    [[noreturn]] void fail(const char* verb, const std::filesystem::path& path) {
      {
        const std::lock_guard lock(mutex);
        ++failures;
      }
      throw std::system_error(
          ENOSPC, std::generic_category(),
          std::string("FailingStorage: injected failure of ") + verb + " for '" + path.string() + "'");
    }
  };

  std::int64_t count(const Counter& counter) const {
    const std::lock_guard lock(state_->mutex);
    return counter.count;
  }
  void set_held(bool held) {
    const std::lock_guard lock(state_->mutex);
    state_->held = held;
    state_->changed.notify_all();
  }

  LocalFiles files_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace frugal::inline v0::testing
