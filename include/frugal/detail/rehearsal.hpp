#pragma once

#include <frugal/detail/bookings.hpp>
#include <frugal/detail/evaluation.hpp>
#include <frugal/update.hpp>

#include <stdexcept>
#include <type_traits>

namespace frugal::inline v0 {
class GradAccumulator;
class GradClip;
class FusedStep;
}  // namespace frugal::inline v0

namespace frugal::inline v0::detail {

// Found by argument-dependent look-up: calibration.hpp knows tensors, this header does not.
auto call_calibrate(auto& precision, auto& model, auto& optimizer, auto&& step, const auto&... options)
  requires requires { calibrate(precision, model, optimizer, step, options...); }
{
  return calibrate(precision, model, optimizer, step, options...);
}

// Our own policies are copied, so that they do not speak of a step that was none. A user's may be anything: it makes the
// steps itself.
template <class Policy>
constexpr bool is_ours =
    std::is_same_v<Policy, GradAccumulator> || std::is_same_v<Policy, GradClip> || std::is_same_v<Policy, FusedStep>;
template <class Policy>
using Spare = std::conditional_t<is_ours<Policy>, Policy, Policy&>;

// Steps of a Trainer that leave no trace: what calibrate() measures.
template <class Model, class Optimizer, class Loss, class... Policies>
class Rehearsal : protected Bookings<Model, Optimizer, Loss, Policies...> {
  using Base = Bookings<Model, Optimizer, Loss, Policies...>;

 protected:
  using Base::accumulation, Base::clipping, Base::model_, Base::optimizer_, Base::precision, Base::updating;
  using Base::Base;

  template <class Batch>
  auto calibrated(const Batch& batch, const auto&... options) {
    constexpr bool can = !Base::Composed::needs_closure &&
                         requires { call_calibrate(precision(), model_, optimizer_, [] {}, options...); };
    static_assert(can,
                  "Trainer: calibrate() needs an AmpPolicy, an optimizer that steps without a closure, and "
                  "`#include <frugal/calibration.hpp>`. Another precision policy has nothing to choose from.");
    if constexpr (can) {
      this->book();
      if (accumulation().pending())
        throw std::invalid_argument("Trainer: calibrate() inside a window. Call it before the first step, or flush().");
      Spare<std::remove_reference_t<decltype(accumulation())>> accumulating = accumulation();
      Spare<std::remove_reference_t<decltype(clipping())>> clips = clipping();
      Spare<std::remove_reference_t<decltype(updating())>> steps = updating();
      const auto step = [&] {
        train_mode(model_);  // here, where calibrate() guards it
        whole_window(batch, accumulating, clips, steps);
      };
      return call_calibrate(precision(), model_, optimizer_, step, options...);
    }
  }

 private:
  // With nothing booked; model, optimizer and the precision policy are guarded by calibrate().
  template <class Batch>
  void whole_window(const Batch& batch, auto& accumulating, auto& clips, auto& steps) {
    accumulating.finish();  // micro-batches without a sample count towards the next window
    try {
      for (bool full = false; !full;) {
        auto [loss, weight] = this->evaluate(batch);
        if (weight == 0) throw std::invalid_argument("Trainer: calibrate() got a batch without a sample or token.");
        full = this->backward(loss, weight, accumulating);
      }
    } catch (...) {
      accumulating.finish();
      throw;
    }
    update_window(optimizer_, precision(), accumulating, clips, steps, [] {});
    answered(optimizer_, precision(), steps);
  }
};

}  // namespace frugal::inline v0::detail
