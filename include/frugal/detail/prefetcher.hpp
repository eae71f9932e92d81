#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// Makes the items first, first + 1, ... up to `last` (exclusive) on a thread of its own, in order, and at most `ahead`
// of them before somebody takes them. An exception of `make` comes out of the take() that would have returned its item;
// nothing is made after it. Destruction waits for the item in the making, drops the rest and joins the thread.
template <class Item>
class Prefetcher {
 public:
  Prefetcher(std::int64_t first, std::int64_t last, std::int64_t ahead, std::function<Item(std::int64_t)> make)
      : made_(first),
        taken_(first),
        last_(last),
        ring_(static_cast<std::size_t>(ahead)),
        make_(std::move(make)),
        worker_([this] { work(); }) {}
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;
  ~Prefetcher() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    room_.notify_one();
    worker_.join();
  }

  // The next item; waits for it. Nothing after the last one.
  std::optional<Item> take() {
    std::unique_lock lock(mutex_);
    ready_.wait(lock, [this] { return taken_ < made_ || failed_ || taken_ == last_; });
    return take_ready();
  }
  // The next item if it is there already. Never throws: a failure waits for take().
  std::optional<Item> try_take() {
    std::lock_guard lock(mutex_);
    return taken_ < made_ ? take_ready() : std::nullopt;
  }

 private:
  std::optional<Item> take_ready() {
    if (taken_ == made_ && failed_) std::rethrow_exception(failed_);
    if (taken_ == made_) return std::nullopt;
    std::optional<Item> item = std::exchange(slot(taken_), std::nullopt);
    ++taken_;
    room_.notify_one();
    return item;
  }

  void work() {
    for (std::int64_t next = taken_; next < last_; ++next) {  // nobody can take before the first item is made
      {
        std::unique_lock lock(mutex_);
        room_.wait(lock, [&] { return stopping_ || next - taken_ < static_cast<std::int64_t>(ring_.size()); });
        if (stopping_) return;
      }
      try {
        Item item = make_(next);
        std::lock_guard lock(mutex_);
        slot(next).emplace(std::move(item));
        made_ = next + 1;
      } catch (...) {
        std::lock_guard lock(mutex_);
        failed_ = std::current_exception();
      }
      ready_.notify_one();
      if (failed_) return;  // written by this thread only
    }
  }

  std::optional<Item>& slot(std::int64_t i) { return ring_[static_cast<std::size_t>(i) % ring_.size()]; }

  std::mutex mutex_;
  std::condition_variable ready_, room_;
  std::int64_t made_, taken_;  // items before these are made, taken
  const std::int64_t last_;
  std::vector<std::optional<Item>> ring_;
  std::exception_ptr failed_;
  bool stopping_ = false;
  std::function<Item(std::int64_t)> make_;
  std::thread worker_;  // last: it starts when everything else is there
};

}  // namespace frugal::inline v0::detail
