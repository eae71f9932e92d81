#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace frugal::inline v0::testing {

/// Memory with a hidden limit: called with more samples than fit, it throws the error of a device that is out of
/// memory. It remembers what was tried. Copies share one memory: keep one, give one away.
///
///     frugal::testing::MemoryOracle oracle(85);
///     auto plan = frugal::BatchSizeProber{}.plan(256, oracle);          // 4 steps of 64
///     assert(oracle.succeeded(64) || oracle.largest() > 64);
///
/// For the form with a model, call it where the batch is made: `[&](std::int64_t n) { oracle(n); return batch_of(n);
/// }`.
class MemoryOracle {
 public:
  /// So many samples fit.
  explicit MemoryOracle(std::int64_t limit) : state_(std::make_shared<State>(State{limit, {}})) {}

  /// Throws c10::OutOfMemoryError when `size` is above the limit.
  void operator()(std::int64_t size) const {
    state_->tried.push_back(size);
    TORCH_CHECK_WITH(OutOfMemoryError, size <= state_->limit, "MemoryOracle: out of memory with ", size, " samples.");
  }

  /// All sizes that were tried, in order.
  const std::vector<std::int64_t>& tried() const { return state_->tried; }
  /// Whether this size was tried and fitted.
  bool succeeded(std::int64_t size) const {
    return size <= state_->limit && std::ranges::find(state_->tried, size) != state_->tried.end();
  }
  /// The largest size that was tried and fitted; 0 when there is none.
  std::int64_t largest() const {
    std::int64_t largest = 0;
    for (const std::int64_t size : state_->tried)
      if (size <= state_->limit) largest = std::max(largest, size);
    return largest;
  }

 private:
  struct State {
    std::int64_t limit;
    std::vector<std::int64_t> tried;
  };
  std::shared_ptr<State> state_;
};

}  // namespace frugal::inline v0::testing
