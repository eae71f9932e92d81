#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <numbers>
#include <stdexcept>
#include <string>
#include <utility>

// What the functions of schedule.hpp share.
namespace frugal::inline v0::detail {

inline void need_rate(bool holds, const char* function, const char* what) {
  if (!holds) throw std::invalid_argument(std::string(function) + ": " + what);
}
inline void need_steps(std::int64_t steps, const char* function) {
  need_rate(steps >= 1, function, "the number of steps is below 1. Pass the optimizer steps that it spans.");
}
inline bool is_rate(double rate) { return std::isfinite(rate) && rate >= 0; }

// How much of `total` lies behind `step`, in [0, 1].
inline double share_done(std::int64_t step, std::int64_t total) {
  return std::clamp(static_cast<double>(step) / static_cast<double>(total), 0.0, 1.0);
}
// Half a cosine wave from `from` at share 0 to `to` at share 1.
inline double half_cosine(double from, double to, double share) {
  return to + (from - to) * 0.5 * (1 + std::cos(std::numbers::pi * share));
}

}  // namespace frugal::inline v0::detail
