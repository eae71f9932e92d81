#pragma once

#include <frugal/policy.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

namespace frugal::inline v0 {

/// What a NaN or infinite metric does. count: a failing check. stop: ends the run. ignore: neither fails
/// nor improves; it only has its number (see best_at()).
enum class NonFinite { count, stop, ignore };

struct EarlyStopperOptions {
  std::int64_t patience = 3;  ///< failing checks in a row that end the run; at least 1
  double min_delta = 0;       ///< a check improves when it beats the best one by more than this; not negative
  bool relative = false;      ///< min_delta is a share of |best|
  Goal goal = Goal::minimize;
  std::int64_t warmup = 0;  ///< first checks that do not count towards patience; the best one moves all the same
  double smoothing = 0;     ///< factor of an exponential moving average over the metric, in [0, 1); 0: none
  std::optional<double> target = {};       ///< a metric at least as good ends the run
  std::optional<double> diverged_at = {};  ///< a metric at least as bad ends the run
  NonFinite non_finite = NonFinite::count;
  bool restore_best = true;  ///< the Trainer brings the best weights back when the run ends
};

/// Watches one metric and says when to stop.
///
///     EarlyStopper stopper({.patience = 5});
///     if (stopper.observe(validate()) == Verdict::stop) break;      // stopper.reason() tells why
///
/// A check improves when `metric < best - delta` (minimize) or `metric > best + delta` (maximize), strictly. The
/// `patience`-th failing check in a row stops. With smoothing the smoothed metric is compared, and is what best() gives;
/// target and divergence look at the metric itself, in warm-up too. A non-finite metric never improves.
///
/// A stopper alone never sees the model: restoring the best weights is the Trainer's. To switch it off, give it a patience
/// that is never reached.
class EarlyStopper {
 public:
  static constexpr Role role = Role::stopping;

  /// Throws std::invalid_argument on an option outside of its range.
  explicit EarlyStopper(EarlyStopperOptions options = {}) : options_(options) {
    const auto need = [](bool holds, const char* what) {
      if (!holds) throw std::invalid_argument(std::string("EarlyStopper: ") + what);
    };
    need(options.patience >= 1, "patience must be at least 1.");
    need(options.min_delta >= 0 && std::isfinite(options.min_delta), "min_delta must be finite and not negative.");
    need(options.warmup >= 0, "warmup must not be negative. It is the number of checks that patience ignores.");
    need(options.smoothing >= 0 && options.smoothing < 1, "smoothing must lie in [0, 1). 0 means none.");
    need(!options.target || !std::isnan(*options.target), "target must be a number.");
    need(!options.diverged_at || !std::isnan(*options.diverged_at), "diverged_at must be a number.");
  }

  /// One check. A check can stop the run and be the best one: compare best_at(). Once it has said stop it goes on saying
  /// so, until new_stage().
  Verdict observe(double metric) {
    if (reason_ != StopReason::none) return Verdict::stop;
    const std::int64_t check = checks_++;
    if (!std::isfinite(metric)) return non_finite(metric, check);
    smoothed_ = seen_any_ ? options_.smoothing * smoothed_ + (1 - options_.smoothing) * metric : metric;
    seen_any_ = true;

    const bool improved = best_at_ < 0 || beats_best(smoothed_);
    if (improved) best_ = smoothed_, best_at_ = check, waited_ = 0;
    if (options_.target && reaches(metric, *options_.target)) return stop(StopReason::target_reached);
    if (options_.diverged_at && reaches(*options_.diverged_at, metric)) return stop(StopReason::diverged);
    return improved ? Verdict::improved : failed(check);
  }

  /// The best (smoothed) metric; NaN before the first finite check.
  double best() const { return best_; }
  /// The 0-based check that it belongs to; -1 before the first finite check.
  std::int64_t best_at() const { return best_at_; }
  /// Failing checks since the best one, warm-up aside.
  std::int64_t waited() const { return waited_; }
  /// Why it said stop; `none` as long as it has not.
  StopReason reason() const { return reason_; }
  bool restores_best() const { return options_.restore_best; }

  /// The next stage of a curriculum is harder and its metrics cannot be compared: forgets everything that was observed,
  /// the best and a verdict included, and warms up again. The Trainer then forgets the best weights too.
  void new_stage() { *this = EarlyStopper(options_); }
  /// As constructed.
  void reset() { new_stage(); }

  void readings(auto& out) const {
    out.write("best", best_);
    out.write("waited", static_cast<double>(waited_));
  }

  void save(auto& out) const {
    out.write("checks", checks_);
    out.write("best", best_);
    out.write("best_at", best_at_);
    out.write("waited", waited_);
    out.write("smoothed", smoothed_);
    out.write("seen_any", std::int64_t{seen_any_});
    out.write("reason", static_cast<std::int64_t>(reason_));
  }
  void load(auto& in) {
    std::int64_t seen_any = 0, reason = 0;
    in.read("checks", checks_);
    in.read("best", best_);
    in.read("best_at", best_at_);
    in.read("waited", waited_);
    in.read("smoothed", smoothed_);
    in.read("seen_any", seen_any);
    in.read("reason", reason);
    seen_any_ = seen_any != 0;
    reason_ = static_cast<StopReason>(reason);
  }

 private:
  Verdict non_finite(double metric, std::int64_t check) {
    if (options_.non_finite == NonFinite::ignore) return Verdict::waiting;
    if (options_.non_finite == NonFinite::stop) return stop(StopReason::non_finite);
    if (options_.diverged_at && reaches(*options_.diverged_at, metric)) return stop(StopReason::diverged);
    return failed(check);
  }
  // `metric` is at least as good as `mark`; false when either is NaN.
  bool reaches(double metric, double mark) const {
    return options_.goal == Goal::minimize ? metric <= mark : metric >= mark;
  }
  bool beats_best(double current) const {
    const double delta = options_.relative ? options_.min_delta * std::abs(best_) : options_.min_delta;
    return options_.goal == Goal::minimize ? current < best_ - delta : current > best_ + delta;
  }
  Verdict failed(std::int64_t check) {
    if (check < options_.warmup) return Verdict::waiting;
    return ++waited_ >= options_.patience ? stop(StopReason::plateau) : Verdict::waiting;
  }
  Verdict stop(StopReason reason) { return reason_ = reason, Verdict::stop; }

  EarlyStopperOptions options_;
  std::int64_t checks_ = 0;
  double best_ = std::numeric_limits<double>::quiet_NaN();
  std::int64_t best_at_ = -1;
  std::int64_t waited_ = 0;
  double smoothed_ = 0;
  bool seen_any_ = false;
  StopReason reason_ = StopReason::none;
};

}  // namespace frugal::inline v0
