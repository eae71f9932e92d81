#pragma once

#include <atomic>
#include <chrono>
#include <memory>

namespace frugal::inline v0::testing {

/// A steady clock that stands still until it is told to move. Copies show the same time: keep one, give one away.
///
///     frugal::testing::FakeClock clock;
///     auto seconds = std::function<std::chrono::steady_clock::time_point()>(clock);   // what takes a clock
///     clock.advance(std::chrono::minutes(10));                                        // ... has waited ten minutes
///
/// It starts at the epoch of steady_clock (0), and may be read by several threads.
class FakeClock {
 public:
  using clock = std::chrono::steady_clock;
  using duration = clock::duration;
  using time_point = clock::time_point;

  /// The time that was set.
  time_point operator()() const { return time_point(duration(now_->load())); }
  /// The same, spelt as the standard's clocks spell it.
  time_point now() const { return (*this)(); }
  /// Moves on by `by`. A negative duration is possible and is what a real steady clock never does.
  void advance(duration by) { now_->fetch_add(by.count()); }
  /// Moves to `to`.
  void set(time_point to) { now_->store(to.time_since_epoch().count()); }

 private:
  std::shared_ptr<std::atomic<duration::rep>> now_ = std::make_shared<std::atomic<duration::rep>>(0);
};

}  // namespace frugal::inline v0::testing
