#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

namespace frugal::inline v0 {

/// What a trial used, in bytes: a trial that returns it is measured, and the search needs fewer trials.
struct MemoryUse {
  double peak = 0;      ///< the most that was in use at any time of the trial
  double capacity = 0;  ///< what there is
};

namespace detail {

constexpr std::int64_t ceil_div(std::int64_t total, std::int64_t part) { return (total + part - 1) / part; }

// Memory as a straight line over the size, through the two largest sizes that were measured.
class MemoryLine {
 public:
  void add(std::int64_t size, const MemoryUse& use) {
    const Point point{static_cast<double>(size), use.peak};
    capacity_ = use.capacity;
    if (points_ == 0 || point.size > high_.size) low_ = std::exchange(high_, point);
    else if (points_ == 1 || point.size > low_.size) low_ = point;
    ++points_;
  }
  // The largest size whose peak is within `share` of the capacity; nothing before two sizes were measured, and where
  // more samples did not take more memory.
  std::optional<std::int64_t> largest(double share) const {
    if (points_ < 2 || !(high_.size > low_.size) || !(high_.peak > low_.peak)) return std::nullopt;
    const double slope = (high_.peak - low_.peak) / (high_.size - low_.size);
    const double size = high_.size + (share * capacity_ - high_.peak) / slope;
    return static_cast<std::int64_t>(std::clamp(std::floor(size), 0.0, 1e15));
  }

 private:
  struct Point { double size = 0, peak = 0; };
  Point low_, high_;
  double capacity_ = 0;
  int points_ = 0;
};

// Candidates 0 .. count-1 whose sizes do not grow: finds the first that fits, with few trials. What fits is monotone.
template <class SizeAt>
class BatchSearch {
 public:
  BatchSearch(std::int64_t count, SizeAt size_at) : count_(count), size_at_(std::move(size_at)), good_(count) {}

  // fits(size) makes a trial; more() says whether one more may be made; line() is the largest size that should fit, if
  // that is known. `count` when nothing fits.
  std::int64_t run(auto&& fits, auto&& more, auto&& line) {
    std::int64_t next = std::min(first_up_to(moderate), count_ - 1);
    while (next > bad_ && next < good_ && more()) {
      const std::int64_t size = size_at_(next);
      if (fits(size)) good_ = first_up_to(size);
      else bad_ = first_up_to(size - 1) - 1;
      next = propose(line());
    }
    return good_;
  }

 private:
  static constexpr std::int64_t moderate = 32;  // where to begin; some modules cannot take one sample
  static constexpr double close = 1.02;         // a gain of two per cent is not worth a measured trial

  std::int64_t first_up_to(std::int64_t size) const {
    std::int64_t low = 0, high = count_;
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      if (size_at_(middle) <= size) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // The next candidate between the two bounds; good_ when there is nothing to gain.
  std::int64_t propose(std::optional<std::int64_t> line) const {
    if (good_ - bad_ <= 1) return good_;
    const auto within = [&](std::int64_t at) { return std::clamp(at, bad_ + 1, good_ - 1); };
    if (good_ == count_) {  // nothing fits yet: halve, and do not jump over 2
      const std::int64_t size = size_at_(bad_);
      return within(first_up_to(size > 3 ? size / 2 : size - 1));
    }
    const std::int64_t size = size_at_(good_);
    if (line) {
      const auto worth_it = [&](std::int64_t other) {
        return static_cast<double>(other) > close * static_cast<double>(size);
      };
      const std::int64_t at = first_up_to(*line);
      if (at >= good_ || !worth_it(size_at_(at)) || (bad_ >= 0 && !worth_it(size_at_(bad_)))) return good_;
      if (at > bad_) return at;  // else it failed there: memory is no line
    }
    if (bad_ < 0) return within(first_up_to(size > std::numeric_limits<std::int64_t>::max() / 4 ? size : 4 * size));
    const std::int64_t gap = size_at_(bad_) - size;
    return within(good_ - bad_ <= gap ? bad_ + (good_ - bad_) / 2 : first_up_to(size + gap / 2));
  }

  std::int64_t count_;
  SizeAt size_at_;
  std::int64_t bad_ = -1;  // everything up to here is too big
  std::int64_t good_;      // fits
};

}  // namespace detail
}  // namespace frugal::inline v0
