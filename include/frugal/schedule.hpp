#pragma once

#include <frugal/detail/base_rates.hpp>
#include <frugal/detail/rate_functions.hpp>
#include <frugal/policy.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

/// Learning rates over the optimizer steps: `Schedule` follows a function of the step, `ReduceOnPlateau` a metric. The
/// functions below are plain values of type double(std::int64_t step) that compose:
///
///     frugal::Schedule(frugal::warmup(500, frugal::cosine(total_steps - 500)))
///
/// All of them are multipliers of the learning rates that the optimizer was built with, count optimizer steps from 0,
/// treat a step below 0 as 0 and keep their last value beyond their end. They throw std::invalid_argument on arguments
/// outside of the stated range.
namespace frugal::inline v0 {

/// `rate`, always; Schedule(constant()) is a schedule that does nothing. `rate` is finite and not negative.
inline auto constant(double rate = 1.0) {
  detail::need_rate(detail::is_rate(rate), "constant", "the rate must be finite and not negative.");
  return [rate](std::int64_t) { return rate; };
}

/// Rises linearly to the first value of `then`, which follows from its own step 0 on:
/// `(step + 1) / steps * then(0)` for step < steps, `then(step - steps)` from there. 0 steps: no warm-up.
template <std::invocable<std::int64_t> Rate>
auto warmup(std::int64_t steps, Rate then) {
  detail::need_rate(steps >= 0, "warmup", "the number of steps is negative. 0 means none.");
  return [steps, then = std::move(then)](std::int64_t step) -> double {
    if (step >= steps) return then(step - steps);
    return static_cast<double>(std::max<std::int64_t>(step, 0) + 1) / static_cast<double>(steps) * then(0);
  };
}
/// A warm-up to the full rate, which stays.
inline auto warmup(std::int64_t steps) { return warmup(steps, constant()); }

/// Half a cosine wave from 1 to `floor` over `total` steps, total >= 1:
/// `floor + (1 - floor) * (1 + cos(pi * step / total)) / 2` (SGDR without restarts, Loshchilov and Hutter 2017).
inline auto cosine(std::int64_t total, double floor = 0.0) {
  detail::need_steps(total, "cosine");
  detail::need_rate(detail::is_rate(floor), "cosine", "the floor must be finite and not negative.");
  return [=](std::int64_t step) { return detail::half_cosine(1.0, floor, detail::share_done(step, total)); };
}

/// A straight line from 1 to `end` over `total` steps, total >= 1.
inline auto linear(std::int64_t total, double end = 0.0) {
  detail::need_steps(total, "linear");
  detail::need_rate(detail::is_rate(end), "linear", "the end must be finite and not negative.");
  return [=](std::int64_t step) { return 1 + (end - 1) * detail::share_done(step, total); };
}

/// `factor` to the power of `step / every`, rounded down; every >= 1, factor finite and not negative.
inline auto step_decay(std::int64_t every, double factor = 0.1) {
  detail::need_steps(every, "step_decay");
  detail::need_rate(detail::is_rate(factor), "step_decay", "the factor must be finite and not negative.");
  return
      [=](std::int64_t step) { return std::pow(factor, static_cast<double>(std::max<std::int64_t>(step, 0) / every)); };
}

struct OneCycleOptions {
  double peak_at = 0.3;        ///< share of the steps in which the rate rises, in [0, 1]
  double start_divisor = 25;   ///< the first rate is 1 / start_divisor; at least 1
  double end_divisor = 10000;  ///< the last rate is the first one / end_divisor; at least 1
};

/// One cycle over `total` steps, total >= 1: half a cosine wave from 1 / start_divisor up to 1, which is reached at
/// step `peak_at * total - 1`, and another one down to the last rate at step `total - 1`. The optimizer's learning rate
/// is the peak (Smith and Topin 2018, "Super-Convergence", with the cosines of fastai; as torch's OneCycleLR).
inline auto one_cycle(std::int64_t total, OneCycleOptions options = {}) {
  detail::need_steps(total, "one_cycle");
  detail::need_rate(options.peak_at >= 0 && options.peak_at <= 1, "one_cycle", "peak_at must lie in [0, 1].");
  detail::need_rate(std::isfinite(options.start_divisor) && options.start_divisor >= 1 &&
                        std::isfinite(options.end_divisor) && options.end_divisor >= 1,
                    "one_cycle", "the divisors must be finite and at least 1.");
  const double last = static_cast<double>(total - 1);
  const double peak = std::max(0.0, options.peak_at * static_cast<double>(total) - 1);
  const double start = 1 / options.start_divisor, end = start / options.end_divisor;
  return [=](std::int64_t step) {
    const double at = std::clamp(static_cast<double>(step), 0.0, last);
    if (at <= peak) return detail::half_cosine(start, 1.0, peak > 0 ? at / peak : 1.0);
    return detail::half_cosine(1.0, end, (at - peak) / (last - peak));
  };
}

/// Sets the learning rates of an optimizer as a function of the step.
///
///     frugal::Schedule schedule(frugal::warmup(100, frugal::cosine(9900)));
///     schedule.apply(optimizer, 0);                                   // before the first step
///     for (std::int64_t step = 0; ...;) { ...; optimizer.step(); schedule.apply(optimizer, ++step); }
///
/// `rate(step)` multiplies each parameter group's base learning rate: the one it had at the first apply() that saw it.
/// Base rates are part of the state, so they survive a checkpoint, and a rate set by hand after the first apply() is
/// overwritten. `rate` must be a pure function: what it remembers is not saved. Costs one call per step and a
/// store per group; no allocation. Switched off by `constant()`.
class Schedule {
 public:
  static constexpr Role role = Role::schedule;

  /// Throws std::invalid_argument on an empty function.
  explicit Schedule(std::function<double(std::int64_t)> rate) : rate_(std::move(rate)) {
    if (!rate_) throw std::invalid_argument("Schedule: the function is empty. Pass a rate, such as constant().");
  }

  /// Sets the rates for optimizer step number `step`, counted from 0. Call it before the first step, after every
  /// applied step and after a resume; a skipped step leaves the rates alone. Throws std::invalid_argument, and changes
  /// nothing, when the rate is negative or not finite, or when the optimizer has fewer groups than before (after
  /// load(): other).
  void apply(auto& optimizer, std::int64_t step) {
    const double rate = rate_(step);
    if (!detail::is_rate(rate))
      throw std::invalid_argument("Schedule: the rate of step " + std::to_string(step) + " is " + std::to_string(rate) +
                                  ". It must be finite and not negative.");
    base_.apply(optimizer, rate, "Schedule");
  }

  /// "rate": the learning rate of the first group, as last set; nothing before the first apply().
  void readings(auto& out) const { base_.readings(out); }
  /// A new run. The base rates stay: what the optimizer holds by now are multiplied ones.
  void reset() {}

  void save(auto& out) const { base_.save(out); }
  void load(auto& in) { base_.load(in); }

 private:
  std::function<double(std::int64_t)> rate_;
  detail::BaseRates base_;
};

struct ReduceOnPlateauOptions {
  double factor = 0.1;         ///< every reduction multiplies the rates by this, in (0, 1]; 1 switches the policy off
  std::int64_t patience = 10;  ///< bad checks in a row that are tolerated: the next one reduces
  double min_delta = 1e-4;     ///< a check is good when it beats the best one by more than this
  bool relative = true;        ///< min_delta is a share of |best|
  Goal goal = Goal::minimize;
  std::int64_t cooldown = 0;  ///< checks after a reduction that do not count as bad
  double min_rate = 0;        ///< the multiplier of the base learning rates never falls below this, in [0, 1]
};

/// Lowers the learning rates when a metric has stopped improving, as torch's ReduceLROnPlateau does (options of the
/// same meaning and default; `min_rate` is a multiplier).
///
///     frugal::ReduceOnPlateau plateau({.factor = 0.5, .patience = 2});
///     plateau.observe(validate());          // after every check; a metric that is not finite is a bad check
///     plateau.apply(optimizer, step);       // sets the rates; the Trainer does it after every step
///
/// A reduction takes effect at the next apply(). With an EarlyStopper, give that one more patience than this.
class ReduceOnPlateau {
 public:
  static constexpr Role role = Role::schedule;

  /// Throws std::invalid_argument on an option outside of its range.
  explicit ReduceOnPlateau(ReduceOnPlateauOptions options = {}) : options_(options) {
    const auto need = [](bool holds, const char* what) { detail::need_rate(holds, "ReduceOnPlateau", what); };
    need(options.factor > 0 && options.factor <= 1, "factor must lie in (0, 1]. 1 switches it off.");
    need(options.patience >= 0, "patience must not be negative.");
    need(detail::is_rate(options.min_delta), "min_delta must be finite and not negative.");
    need(options.cooldown >= 0, "cooldown must not be negative.");
    need(options.min_rate >= 0 && options.min_rate <= 1, "min_rate is a multiplier in [0, 1].");
  }

  /// Sets every group's learning rate to its base rate (at first sight) times multiplier(). Same contract as
  /// Schedule's.
  void apply(auto& optimizer, std::int64_t /*step*/) { base_.apply(optimizer, multiplier_, "ReduceOnPlateau"); }

  /// One check of the metric.
  void observe(double metric) {
    if (std::isfinite(metric) && (std::isnan(best_) || beats_best(metric))) best_ = metric, bad_ = 0;
    else ++bad_;
    if (cooling_ > 0) --cooling_, bad_ = 0;
    if (bad_ <= options_.patience) return;
    multiplier_ = std::min(multiplier_, std::max(multiplier_ * options_.factor, options_.min_rate));
    cooling_ = options_.cooldown, bad_ = 0;
  }

  /// What multiplies the base learning rates.
  double multiplier() const { return multiplier_; }

  /// "rate": the learning rate of the first group, as last set; nothing before the first apply().
  void readings(auto& out) const { base_.readings(out); }
  /// A new run at the full rates; the base rates stay, as in Schedule.
  void reset() { best_ = std::numeric_limits<double>::quiet_NaN(), bad_ = cooling_ = 0, multiplier_ = 1; }

  void save(auto& out) const {
    out.write("best", best_), out.write("bad", bad_), out.write("cooling", cooling_);
    out.write("multiplier", multiplier_);
    base_.save(out);
  }
  void load(auto& in) {
    in.read("best", best_), in.read("bad", bad_), in.read("cooling", cooling_);
    in.read("multiplier", multiplier_);
    base_.load(in);
  }

 private:
  bool beats_best(double metric) const {
    const double delta = options_.relative ? options_.min_delta * std::abs(best_) : options_.min_delta;
    return options_.goal == Goal::minimize ? metric < best_ - delta : metric > best_ + delta;
  }

  ReduceOnPlateauOptions options_;
  double best_ = std::numeric_limits<double>::quiet_NaN();
  std::int64_t bad_ = 0;      // bad checks in a row
  std::int64_t cooling_ = 0;  // checks left that do not count
  double multiplier_ = 1;
  detail::BaseRates base_;
};

}  // namespace frugal::inline v0
