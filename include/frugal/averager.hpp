#pragma once

#include <frugal/detail/autocast.hpp>
#include <frugal/detail/averages.hpp>
#include <frugal/detail/module.hpp>
#include <frugal/detail/open_answers.hpp>
#include <frugal/policy.hpp>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

/// An exponential moving average of a model's weights, for validation and for the model that you ship.
///
///     frugal::Averager average({.decay = 0.999});
///     if (amp.step(optimizer)) average.update(model);     // after every applied step; lagged skips: when settle() says so
///     average.swap(model); validate(model); average.swap(model);
///
/// average = decay * average + (1 - decay) * weights; the first update copies the weights. It is the exponential form
/// of Polyak averaging (Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992): about the
/// last 1 / (1 - decay) steps count, which is less noisy than the last weights and usually validates better. The
/// training itself goes on as if nobody averaged.
///
/// Parameters only: buffers stay the model's own. BatchNorm's running statistics are moving averages already, and
/// counters have no mean. Frozen parameters are not averaged until they are unfrozen. float16 and bfloat16 parameters
/// are averaged in float32. The average lies on the parameter's device and follows it; it costs one more copy of the
/// trained parameters, and one pass over both per update: one foreach kernel per (device, dtype), two for float16 and
/// bfloat16. Nothing is read back; after the first update only what the kernels themselves allocate.
namespace frugal::inline v0 {

/// `early`: the decay of update n (counted from 0) is min(decay, (1 + n) / (10 + n)), so that a short run forgets its
/// first weights too (the `num_updates` rule of TensorFlow's tf.train.ExponentialMovingAverage). `none`: always
/// `decay`.
enum class DecayRamp { early, none };

/// Options of Averager.
struct AveragerOptions {
  double decay = 0.999;    ///< in [0, 1); 0 switches averaging off
  std::int64_t every = 1;  ///< average every nth call of update(); the decay is per average taken
  DecayRamp ramp = DecayRamp::early;
};

/// Averages the parameters of one model: a Module, a ModuleHolder or a shared_ptr. Holds references to its parameters
/// from the first update on. A parameter that is replaced by another tensor object afterwards is not noticed (`to()`,
/// `load_parameters` and copies keep the objects). Movable; one that was moved from starts afresh.
class Averager {
 public:
  static constexpr Role role = Role::averaging;

  /// Throws when decay is outside [0, 1) or every is below 1.
  explicit Averager(AveragerOptions options = {}) : options_(options) {
    TORCH_CHECK(options.decay >= 0 && options.decay < 1, "Averager: decay is ", options.decay,
                ". It must lie in [0, 1); 0 switches averaging off.");
    TORCH_CHECK(options.every >= 1, "Averager: every is ", options.every, ". It must be at least 1.");
  }

  /// Takes the weights into the average. Call it after every applied step, never after a skipped one. Throws while the
  /// average is swapped in, when the model does not fit a loaded state, and, as swap() does, while nobody knows whether the
  /// last step was skipped (SkipDecision::lagged).
  void update(const auto& model) {
    if (options_.decay == 0.0) return;
    detail::expect_answered_for_module("Averager: update()", detail::module_of(model));
    TORCH_CHECK(!averages_.swapped(), "Averager: update() while the average is in the model. Call swap() first.");
    if (++calls_ % options_.every != 0) return;
    averages_.follow(detail::module_of(model));
    averages_.mix(1.0 - decay());
    ++updates_;
  }

  /// Exchanges the model's weights with the average, bit for bit in both directions: swap in, validate, swap back. Does
  /// nothing before the first update. One copy in memory more while float16 or bfloat16 weights are swapped out.
  void swap(auto& model) {
    if (!averaging()) return;
    detail::expect_answered_for_module("Averager: swap()", detail::module_of(model));
    averages_.follow(detail::module_of(model));
    averages_.swap();
    if (swapped()) shown_ = calls_;
    detail::forget_casts();  // casts of the other weights
  }

  /// Whether there is an average to swap in: not when switched off, not before the first update.
  bool averaging() const { return options_.decay != 0.0 && updates_ > 0; }
  /// Whether the average is in the model now, and the weights are in here.
  bool swapped() const { return averages_.swapped(); }
  /// The decay of the next update.
  double decay() const {
    const auto n = static_cast<double>(updates_);
    return options_.ramp == DecayRamp::early ? std::min(options_.decay, (1.0 + n) / (10.0 + n)) : options_.decay;
  }

  /// For CheckpointManager: whose metric a checkpoint holds. out(parameter, value in this section) for every average, if they
  /// were in the model since the last update(): then what was validated are the averages.
  void measured(const auto& module, auto&& out) const {
    if (averaging() && shown_ == calls_) averages_.measured(module, out);
  }

  /// `decay`, while averaging.
  void readings(auto& out) const {
    if (averaging()) out.write("decay", decay());
  }
  /// Moves the average; update() and swap() move it to where the parameters are in any case.
  void to(at::Device device) { averages_.to(device); }

  /// A new run: no average. What is in the model, stays there.
  void reset() { *this = Averager(options_); }
  /// Averages by parameter name, and while swapped in the weights too: the state is complete at any time.
  void save(auto& out) const {
    out.write("updates", updates_);
    out.write("calls", calls_);
    out.write("shown", shown_);
    averages_.save(out);
  }
  /// May come before the model is known; the first update() or swap() then checks names, shapes and dtypes.
  void load(auto& in) {
    in.read("updates", updates_);
    in.read("calls", calls_);
    shown_ = -1;
    if (in.has("shown")) in.read("shown", shown_);  // not in a checkpoint of an earlier version
    averages_.load(in);
  }

 private:
  AveragerOptions options_;
  std::int64_t calls_ = 0, updates_ = 0;
  std::int64_t shown_ = -1;  // `calls_` when the average was last put into a model
  detail::Averages averages_;
};

}  // namespace frugal::inline v0
