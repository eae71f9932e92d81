#pragma once

#include <frugal/detail/bookings.hpp>
#include <frugal/detail/evaluation.hpp>
#include <frugal/update.hpp>

#include <stdexcept>
#include <utility>

namespace frugal::inline v0::detail {

// Found by argument-dependent look-up: calibration.hpp knows tensors, this header does not.
auto call_calibrate(auto& precision, auto& model, auto& optimizer, auto&& step, const auto&... options)
  requires requires { calibrate(precision, model, optimizer, step, options...); }
{
  return calibrate(precision, model, optimizer, step, options...);
}

// Steps of a Trainer that leave no trace: what calibrate() measures.
template <class Model, class Optimizer, class Loss, class... Policies>
class Rehearsal : protected Bookings<Model, Optimizer, Loss, Policies...> {
  using Base = Bookings<Model, Optimizer, Loss, Policies...>;

 protected:
  using Base::accumulation, Base::model_, Base::optimizer_, Base::precision;
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
      bool first = true;
      const auto step = [&] {
        if (std::exchange(first, false)) train_mode(model_);  // here, where calibrate() guards it
        whole_window(batch);
      };
      return call_calibrate(precision(), model_, optimizer_, step, options...);
    }
  }

 private:
  // With nothing booked, and the accumulation policy as before; model and optimizer are guarded by calibrate().
  template <class Batch>
  void whole_window(const Batch& batch) {
    accumulation().finish();  // micro-batches without a sample count towards the next window
    try {
      for (bool full = false; !full;) {
        auto [loss, weight] = this->evaluate(batch);
        if (weight == 0) throw std::invalid_argument("Trainer: calibrate() got a batch without a sample or token.");
        full = this->backward(loss, weight);
      }
    } catch (...) {
      accumulation().finish();
      throw;
    }
    update_window(optimizer_, precision(), accumulation(), this->clipping(), this->updating(), [] {});
    answered(optimizer_, precision(), this->updating());
  }
};

}  // namespace frugal::inline v0::detail
