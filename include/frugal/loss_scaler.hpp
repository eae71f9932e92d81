#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

/// Dynamic loss scaling: how large the scale of an fp16 loss is, as a state machine without tensors.
///
/// Small gradients vanish in fp16, so the loss is multiplied by a scale before backward and the gradients are divided
/// by it afterwards. The scale grows while everything stays finite and backs off when something overflows (Micikevicius
/// et al., "Mixed Precision Training", 2018). AmpPolicy drives one; use it alone to scale by hand:
///
///     frugal::LossScaler scaler;
///     loss.to(at::kFloat).mul(scaler.scale()).backward();
///     finite ? scaler.applied() : scaler.overflowed();
namespace frugal::inline v0 {

/// All counts are in windows (optimizer steps, applied or skipped).
struct LossScalerOptions {
  double init_scale = 65536;
  double growth = 2;     ///< factor after `growth_interval` applied windows in a row; 1: never grows
  double backoff = 0.5;  ///< factor after an overflow; 1: never shrinks
  std::int64_t growth_interval = 2000;
  double min_scale = 1;  ///< the scale never leaves [min_scale, max_scale], so it is never 0
  double max_scale = 16777216;
  std::int64_t hysteresis = 1;               ///< overflows in a row that are needed for a backoff
  std::int64_t max_consecutive_skips = 100;  ///< so many skips in a row are an error
};

/// The state machine. Call applied() or overflowed() once per window. A small value: copyable, no allocation.
class LossScaler {
 public:
  /// Throws when the options contradict each other.
  explicit LossScaler(LossScalerOptions options = {});

  /// What to multiply the loss by.
  double scale() const { return scale_; }
  /// Windows that overflowed, since the start of the run.
  std::int64_t skipped() const { return skipped_; }
  /// Whether the next overflowed() throws: the last chance to say so where the step is known.
  bool exhausted() const { return skips_in_a_row_ + 1 >= options_.max_consecutive_skips; }

  /// The window's gradients were finite and the step was taken.
  void applied();
  /// The window's gradients were not finite and the step was skipped. Throws when this is overflow number
  /// `max_consecutive_skips` in a row.
  void overflowed();

  /// As constructed.
  void reset() { *this = LossScaler(options_); }
  void save(auto& out) const {
    out.write("scale", scale_);
    out.write("windows", windows_);
    out.write("skipped", skipped_);
    out.write("applied_in_a_row", applied_in_a_row_);
    out.write("skips_in_a_row", skips_in_a_row_);
    out.write("towards_backoff", towards_backoff_);
  }
  /// The options stay as constructed: a scale outside their bounds is moved to the nearest bound.
  void load(auto& in) {
    in.read("scale", scale_);
    in.read("windows", windows_);
    in.read("skipped", skipped_);
    in.read("applied_in_a_row", applied_in_a_row_);
    in.read("skips_in_a_row", skips_in_a_row_);
    in.read("towards_backoff", towards_backoff_);
    TORCH_CHECK(std::isfinite(scale_), "LossScaler: the saved scale is ", scale_, ". The state is damaged.");
    scale_ = std::clamp(scale_, options_.min_scale, options_.max_scale);
  }

 private:
  LossScalerOptions options_;
  double scale_;
  std::int64_t windows_ = 0, skipped_ = 0;
  std::int64_t applied_in_a_row_ = 0;  // since the last growth or overflow
  std::int64_t skips_in_a_row_ = 0, towards_backoff_ = 0;
};

inline LossScaler::LossScaler(LossScalerOptions options) : options_(options), scale_(options.init_scale) {
  const auto& o = options_;
  TORCH_CHECK(
      o.min_scale > 0 && o.min_scale <= o.init_scale && o.init_scale <= o.max_scale && std::isfinite(o.max_scale),
      "LossScaler: init_scale is ", o.init_scale, " in [", o.min_scale, ", ", o.max_scale,
      "]. It must lie between a positive min_scale and a finite max_scale.");
  TORCH_CHECK(o.growth >= 1 && std::isfinite(o.growth), "LossScaler: growth is ", o.growth, ". It must be at least 1.");
  TORCH_CHECK(o.backoff > 0 && o.backoff <= 1, "LossScaler: backoff is ", o.backoff, ". It must lie in (0, 1].");
  TORCH_CHECK(o.growth_interval >= 1 && o.hysteresis >= 1 && o.max_consecutive_skips >= 1,
              "LossScaler: growth_interval, hysteresis and max_consecutive_skips are ", o.growth_interval, ", ",
              o.hysteresis, " and ", o.max_consecutive_skips, ". Each must be at least 1.");
}

inline void LossScaler::applied() {
  ++windows_;
  skips_in_a_row_ = towards_backoff_ = 0;
  if (++applied_in_a_row_ < options_.growth_interval) return;
  applied_in_a_row_ = 0;
  scale_ = std::min(scale_ * options_.growth, options_.max_scale);
}

inline void LossScaler::overflowed() {
  ++windows_;
  ++skipped_;
  ++skips_in_a_row_;
  applied_in_a_row_ = 0;
  if (++towards_backoff_ >= options_.hysteresis) {
    towards_backoff_ = 0;
    scale_ = std::max(scale_ * options_.backoff, options_.min_scale);
  }
  TORCH_CHECK(
      skips_in_a_row_ < options_.max_consecutive_skips, "LossScaler: step ", windows_, " is overflow number ",
      skips_in_a_row_, " in a row, the scale is down to ", scale_,
      ". Look for NaN in the data and the loss, lower the learning rate, or use AmpPolicy<Bf16>, which needs no "
      "scale.");
}

}  // namespace frugal::inline v0
