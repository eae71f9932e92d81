#pragma once

#include <frugal/policy.hpp>

#include <cstdint>
#include <limits>

namespace frugal::inline v0 {

/// How long fit() trains. Both limits are totals of the run, not of one call: after a resume, or a second fit(), the epochs
/// and steps that are done already count.
struct FitOptions {
  std::int64_t epochs = 1;     ///< 0: no limit
  std::int64_t max_steps = 0;  ///< optimizer steps; 0: no limit
  std::int64_t validate_every_steps =
      0;  ///< validate after every so many steps instead of after every epoch; 0: epochs
};

/// What became of a run.
struct RunReport {
  Progress progress;
  StopReason reason = StopReason::none;
  /// The stopping policy's best metric; without one, the last metric. NaN when there was no validation.
  double best_metric = std::numeric_limits<double>::quiet_NaN();
  double seconds = 0;  ///< wall-clock time of this fit()

  /// For `return` in main: 0 for a run that ended as it should, 75 (EX_TEMPFAIL: requeue me) for a preempted one, 1 for one
  /// that EarlyStopper ended as diverged (`diverged_at`) or for a metric that is no number (NonFinite::stop). By default such
  /// metrics count as no progress, and a run of them ends as plateau, 0, with a best_metric of NaN.
  int exit_code() const {
    if (reason == StopReason::preempted) return 75;
    return reason == StopReason::diverged || reason == StopReason::non_finite ? 1 : 0;
  }
};

/// The word for it: "finished", "plateau", "target reached" ...
constexpr const char* to_string(StopReason reason) {
  switch (reason) {
    case StopReason::none:
      return "none";
    case StopReason::finished:
      return "finished";
    case StopReason::plateau:
      return "plateau";
    case StopReason::target_reached:
      return "target reached";
    case StopReason::diverged:
      return "diverged";
    case StopReason::non_finite:
      return "non-finite metric";
    case StopReason::preempted:
      return "preempted";
    case StopReason::budget:
      return "budget";
  }
  return "unknown";
}

}  // namespace frugal::inline v0
