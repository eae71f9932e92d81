#pragma once

#include <frugal/policy.hpp>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace frugal::inline v0 {

struct GradAccumulatorOptions {
  std::int64_t steps = 1;                       ///< micro-batches in a full window; 1 switches accumulation off
  AtEpochEnd at_epoch_end = AtEpochEnd::flush;  ///< see AtEpochEnd
};

/// Makes one optimizer step out of `steps` micro-batches: the memory of the small batch, the gradient of the large one.
///
/// The gradient that the optimizer sees is the gradient of the mean over all samples (or tokens) of the window, whatever
/// the sizes of its micro-batches, and whatever its length: a short last window is not divided by `steps`.
///
///     GradAccumulator accumulator(4);
///     for (auto& batch : *loader)
///       if (accumulator.backward(loss(model, batch), batch.size())) update(optimizer, accumulator);
///     if (accumulator.pending()) update(optimizer, accumulator);   // the last, shorter window
///
/// The model's gradients must be zero or undefined when a window starts; update() leaves them so. Full windows of equal
/// weights cost one multiplication of each loss and no pass over the gradients; others cost one such pass.
class GradAccumulator {
 public:
  static constexpr Role role = Role::accumulation;

  /// Throws std::invalid_argument when `steps` is below 1.
  explicit GradAccumulator(std::int64_t steps) : GradAccumulator(GradAccumulatorOptions{.steps = steps}) {}
  explicit GradAccumulator(GradAccumulatorOptions options) : options_(options) {
    if (options.steps < 1)
      throw std::invalid_argument("GradAccumulator: steps is " + std::to_string(options.steps) +
                                  ". Use at least 1; 1 means no accumulation.");
  }

  /// Backpropagates `loss`, a mean over `weight` samples or tokens. True when the window is full: step now. A weight of 0
  /// counts as a micro-batch and contributes nothing, whatever its loss; a window of nothing but such is never full.
  /// Throws std::invalid_argument, before anything changed, on a negative or non-finite weight and on a full window that
  /// nobody consumed.
  template <class Loss, class Weight = double>
    requires std::is_arithmetic_v<Weight>
  [[nodiscard]] bool backward(Loss&& loss, Weight weight = 1) {
    return add(loss, static_cast<double>(weight));
  }

  /// What the gradients must be multiplied by before the step. Exactly 1 for a full window of equal weights.
  double factor() const {
    if (weight_ == 0 || (even_ && seen_ == options_.steps)) return 1.0;
    return reference_ * static_cast<double>(options_.steps) / weight_;
  }

  /// Gradients of a window exist that have not been stepped on.
  bool pending() const { return weight_ > 0; }

  /// The window has been consumed, by a step or a skip. update() calls it; call it yourself after your own step.
  void finish() { seen_ = 0, weight_ = reference_ = 0, even_ = true; }

  /// As constructed: forgets the window.
  void reset() { finish(); }

  std::int64_t steps() const { return options_.steps; }
  AtEpochEnd at_epoch_end() const { return options_.at_epoch_end; }

  void save(auto& out) const {
    out.write("steps", options_.steps);
    out.write("seen", seen_);
    out.write("weight", weight_);
    out.write("reference", reference_);
    out.write("even", std::int64_t{even_});
  }
  /// Throws std::invalid_argument on a state that lies inside a window of another length.
  void load(auto& in) {
    std::int64_t steps = 0, seen = 0, even = 1;
    in.read("steps", steps);
    in.read("seen", seen);
    if (seen > 0 && steps != options_.steps)
      throw std::invalid_argument("GradAccumulator: the state lies inside a window of " + std::to_string(steps) +
                                  " micro-batches, this one has " + std::to_string(options_.steps) +
                                  ". Use the same steps until the window ends.");
    in.read("weight", weight_);
    in.read("reference", reference_);
    in.read("even", even);
    seen_ = seen;
    even_ = even != 0;
  }

 private:
  bool add(auto& loss, double weight) {
    if (!(weight >= 0) || !std::isfinite(weight))
      throw std::invalid_argument("GradAccumulator: the weight is " + std::to_string(weight) +
                                  ". Pass the number of samples or tokens behind the loss.");
    if (seen_ == options_.steps)
      throw std::invalid_argument(
          "GradAccumulator: the window is full and nobody consumed it. Call update(), or step "
          "and then finish(), whenever backward() returns true.");
    if (weight > 0) accumulate(loss, weight);  // a mean over nothing is NaN: it never reaches the gradients
    else even_ = false;
    if (++seen_ < options_.steps) return false;
    if (weight_ > 0) return true;
    finish();
    return false;
  }

  // Every loss is weighed against the first one of its window, as if the window were full and even; factor() corrects
  // what was wrong in that guess. Equal weights, the usual case, need no correction.
  void accumulate(auto& loss, double weight) {
    const double reference = weight_ > 0 ? reference_ : weight;
    const double share = weight / (reference * static_cast<double>(options_.steps));
    if (share == 1.0) loss.backward();
    else if constexpr (requires { loss.mul(share).backward(); }) loss.mul(share).backward();
    else (loss * share).backward();
    even_ = even_ && weight == reference;
    reference_ = reference;
    weight_ += weight;
  }

  GradAccumulatorOptions options_;
  std::int64_t seen_ = 0;  // micro-batches in the window so far
  double weight_ = 0;      // their weights
  double reference_ = 0;   // the first weight above 0
  bool even_ = true;       // all of the same weight
};

}  // namespace frugal::inline v0
