#pragma once

#include <frugal/detail/evaluation.hpp>
#include <frugal/detail/parts.hpp>
#include <frugal/policy.hpp>
#include <frugal/run.hpp>

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstdint>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace frugal::inline v0::detail {

// What a Trainer does between its steps: validate, observe, keep the best, save, stop. Everything that several processes
// would have to agree on is decided in one function each: save_if_due, interrupted, stop_reason.
template <class Model, class Optimizer, class Loss, class... Policies>
class Checks : protected Parts<Model, Optimizer, Loss, Policies...> {
  using Base = Parts<Model, Optimizer, Loss, Policies...>;

 protected:
  using typename Base::Composed;
  template <Role R>
  static constexpr bool absent = Composed::template absent<R>;
  template <class Validate>
  static constexpr bool takes_interruption = [] {
    if constexpr (absent<Role::interruption>) return false;
    else return std::invocable<Validate&, typename Composed::template In<Role::interruption>&>;
  }();

  using Base::averaging, Base::best_, Base::checkpointing, Base::each_policy, Base::interruption, Base::model_,
      Base::moved_, Base::optimizer_, Base::phase, Base::progress_, Base::schedule, Base::stopping;
  using Base::Base;

  // One validation, in eval mode, without gradients, on the averaged weights if there are any. False: an interruption cut
  // it short, and its metric does not count.
  template <class Validate>
  bool validated(Validate& validate) {
    if constexpr (!validates<Validate>) return true;
    else {
      phase(Phase::validation);
      bool counts = true;
      const bool averaged = averaging().averaging();
      eval_mode(model_);
      if (averaged) averaging().swap(model_);
      and_always(
          [&] {
            const Metrics metrics = measure(validate);
            counts = !(takes_interruption<Validate> && interrupted());
            if (counts) observe(metrics);
          },
          [&] {
            if (averaged) averaging().swap(model_);
            train_mode(model_);
          });
      return counts;
    }
  }

  template <class Validate>
  Metrics measure(Validate& validate) {
    const c10::NoGradGuard no_grad;
    constexpr bool callable = takes_interruption<Validate> || std::invocable<Validate&>;
    static_assert(callable,
                  "Trainer: validate does not fit. Write `validate()`, or `validate(interruption)` with the "
                  "type of the interruption policy that was passed.");
    if constexpr (callable) {
      const auto call = [&]() -> decltype(auto) {
        if constexpr (takes_interruption<Validate>) return validate(interruption());
        else return validate();
      };
      constexpr bool fits = Metric<decltype(call())>;
      static_assert(fits, "Trainer: validate returns no metric. Return a number, a 0-dim tensor or Metrics.");
      if constexpr (fits) return metrics_of(call());
    }
    return Metrics(0.0);
  }

  void observe(const Metrics& metrics) {
    progress_.metric = metrics.watched();
    progress_.metric_step = progress_.step;
    this->moved();
    if constexpr (Base::keeps_metrics) this->metrics_ = metrics;
    if constexpr (requires { schedule().observe(progress_.metric); }) {
      schedule().observe(progress_.metric);
      schedule().apply(optimizer_, progress_.step);  // the next step has the new rate already
    }
    const std::int64_t best_before = best_check();
    const Verdict verdict = stopping().observe(progress_.metric);
    // a check can be the best one and stop the run (the target is reached): the verdict alone does not tell
    if (keeps_best() && (verdict == Verdict::improved || best_check() != best_before)) best_.keep(model_, optimizer_);
  }

  bool keeps_best() {
    if constexpr (requires {
                    { stopping().restores_best() } -> std::same_as<bool>;
                  })
      return stopping().restores_best();
    else return false;
  }
  std::int64_t best_check() {
    if constexpr (requires { stopping().best_at(); }) return stopping().best_at();
    else return 0;
  }
  double best_metric() {
    if constexpr (requires {
                    { stopping().best() } -> std::convertible_to<double>;
                  })
      return stopping().best();
    else return progress_.metric;
  }

  // A new stage forgets the best check, and with it its weights.
  bool restored_best() {
    if (!keeps_best() || !best_.kept() || best_check() < 0) return false;
    best_.restore(model_, optimizer_);
    return true;
  }
  // What a run leaves in the model: the best weights, else the averaged ones, else the last ones.
  void leave_best() {
    if (restored_best() || averaging().swapped() || !averaging().averaging()) return;
    averaging().swap(model_);
    this->begun_ = false;  // a next step continues on the weights that were being trained
  }

  void save_if_due() {
    if (checkpointing().due(std::as_const(progress_))) save_now();
  }
  void save_now() {
    moved_ = false;
    if constexpr (!absent<Role::checkpointing> && Composed::template fits<Role::checkpointing>) {
      phase(Phase::save);
      this->read_loss();
      this->with_state(
          [&](auto&... state) { checkpointing().save(std::as_const(progress_), model_, optimizer_, state...); });
    }
  }

  bool interrupted() { return interruption().requested(); }

  static bool is_finished(const Progress& at, const FitOptions& options) {
    return (options.epochs > 0 && at.epoch >= options.epochs) ||
           (options.max_steps > 0 && at.step >= options.max_steps);
  }
  // Why the run must not go on, asked after every micro-batch, check and epoch; `none`: it goes on.
  StopReason stop_reason(const FitOptions& options) {
    StopReason reason = stopping().reason();
    each_policy([&](auto& policy) {
      using Type = std::remove_cvref_t<decltype(policy)>;
      if constexpr (plays<Role::observer, Type> && AsksToStop<Type>)
        if (reason == StopReason::none) reason = policy.stop();
    });
    if (reason != StopReason::none) return reason;
    if (is_finished(progress_, options)) return StopReason::finished;
    return interrupted() ? StopReason::preempted : StopReason::none;
  }

  template <class Validate>
  static void expect(const FitOptions& options) {
    const auto need = [](bool holds, const char* sentence) {
      if (!holds) throw std::invalid_argument(std::string("Trainer: ") + sentence);
    };
    constexpr bool somebody_stops = !absent<Role::stopping> || !absent<Role::interruption> ||
                                    ((plays<Role::observer, Policies> && AsksToStop<Policies>) || ...);
    need(options.epochs >= 0 && options.max_steps >= 0 && options.validate_every_steps >= 0,
         "epochs, max_steps and validate_every_steps must not be negative. 0 means no limit, and once per epoch.");
    need(options.epochs > 0 || options.max_steps > 0 || somebody_stops,
         "nothing would ever end this run. Set epochs or max_steps, or pass an EarlyStopper.");
    need(options.validate_every_steps == 0 || validates<Validate>,
         "validate_every_steps is set, but there is no validation. Pass validate to fit().");
    if (!validates<Validate> && !absent<Role::stopping>)
      TORCH_WARN("Trainer: the stopping policy never hears of a metric, since fit() has no validation. Pass validate.");
  }
};

}  // namespace frugal::inline v0::detail
