#pragma once

#include <frugal/detail/autocast.hpp>
#include <frugal/detail/batch_search.hpp>
#include <frugal/detail/out_of_memory.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// Makes trials, a bounded number of them, and remembers what came out.
template <class Trial>
class BatchTrials {
 public:
  // At most `most` trials, of `least` samples and more.
  BatchTrials(Trial& trial, int most, std::int64_t least) : trial_(trial), most_(most), least_(least) {}

  bool left() const { return std::ssize(made_) < most_; }
  const MemoryLine& line() const { return line_; }

  // Whether this size succeeds and, where memory is measured, stays within `share` of it.
  bool fits(std::int64_t size, double share) {
    const Made& made = of(size);
    return made.succeeded && (!made.use || made.use->peak <= share * made.use->capacity);
  }

  // The largest and the smallest size that was tried and succeeded. Throws when there is none.
  std::int64_t largest() const {
    return extreme([](std::int64_t a, std::int64_t b) { return a > b; });
  }
  std::int64_t smallest() const {
    return extreme([](std::int64_t a, std::int64_t b) { return a < b; });
  }
  bool any() const {
    return std::ranges::any_of(made_, [](const Made& made) { return made.succeeded; });
  }

 private:
  struct Made {
    std::int64_t size;
    bool succeeded = false;
    std::optional<MemoryUse> use = {};
  };

  const Made& of(std::int64_t size) {
    const auto known = std::ranges::find(made_, size, &Made::size);
    if (known != made_.end()) return *known;
    const Made& made = made_.emplace_back(make(size));
    if (made.use) line_.add(size, *made.use);
    return made;
  }

  Made make(std::int64_t size) {
    Made made{size};
    std::exception_ptr other;
    try {
      if constexpr (std::convertible_to<decltype(trial_(size)), std::optional<MemoryUse>>) made.use = trial_(size);
      else trial_(size);
      made.succeeded = true;
    } catch (std::exception& error) {
      if (is_out_of_memory(error)) {
        note(error);
      } else {
        if (auto* const libtorch = dynamic_cast<c10::Error*>(&error))  // the same object goes on
          libtorch->add_context(c10::str("BatchSizeProber: this came from a trial of ", size,
                                         " samples. If there are not so many, set max to the size of the data set."));
        other = std::current_exception();
      }
    }
    // Outside of the catch block, where the exception no longer keeps anything alive.
    forget_casts();
    if (!made.succeeded)
      if (auto* const allocator = device_allocator()) allocator->emptyCache();
    if (other) std::rethrow_exception(other);
    return made;
  }
  void note(const std::exception& error) {
    const auto* const libtorch = dynamic_cast<const c10::Error*>(&error);
    last_error_ = libtorch ? libtorch->what_without_backtrace() : error.what();
  }

  std::int64_t extreme(auto&& better) const {
    const Made* best = nullptr;
    for (const Made& made : made_)
      if (made.succeeded && (!best || better(made.size, best->size))) best = &made;
    if (!best) throw_nothing_fits();
    return best->size;
  }
  [[noreturn]] void throw_nothing_fits() const {
    const auto smallest = std::ranges::min_element(made_, {}, &Made::size);
    TORCH_CHECK(smallest != made_.end(), "BatchSizeProber: no trial was made.");
    TORCH_CHECK(smallest->size <= least_, "BatchSizeProber: ", made_.size(), " trials, down to a batch of ",
                smallest->size, ", and none fitted. Raise max_trials. The last error: ", last_error_);
    TORCH_CHECK(false, "BatchSizeProber: not even a batch of ", smallest->size,
                " fits. Use a smaller model, AmpPolicy<Bf16>, or shorter samples. The last error: ", last_error_);
  }

  Trial& trial_;
  int most_;
  std::int64_t least_;
  std::vector<Made> made_;
  MemoryLine line_;
  std::string last_error_;
};

}  // namespace frugal::inline v0::detail
