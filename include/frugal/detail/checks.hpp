#pragma once

#include <frugal/detail/endings.hpp>
#include <frugal/detail/evaluation.hpp>
#include <frugal/policy.hpp>
#include <frugal/run.hpp>

#include <c10/core/GradMode.h>

#include <concepts>
#include <cstdint>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace frugal::inline v0::detail {

// What a Trainer does between its steps: validate, observe, keep the best, save. Everything that several processes would
// have to agree on is decided in one function each: check_due, save_if_due, interrupted, stop_reason.
template <class Model, class Optimizer, class Loss, class... Policies>
class Checks : protected Endings<Model, Optimizer, Loss, Policies...> {
  using Base = Endings<Model, Optimizer, Loss, Policies...>;

 protected:
  using typename Base::Composed;
  template <Role R>
  static constexpr bool absent = Base::template absent<R>;
  template <class Validate>
  static constexpr bool takes_interruption = [] {
    if constexpr (absent<Role::interruption>) return false;
    else return std::invocable<Validate&, typename Composed::template In<Role::interruption>&>;
  }();

  using Base::averaging, Base::best_, Base::each_policy, Base::interruption, Base::model_, Base::moved_,
      Base::optimizer_, Base::phase, Base::progress_, Base::save_if_due, Base::schedule, Base::stopping;
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
      const auto random =
          takes_interruption<Validate> ? typename Base::Random(Base::Random::now()) : typename Base::Random();
      eval_mode(model_);
      if (averaged) averaging().swap(model_);
      and_always(
          [&] {
            const Metrics metrics = measure(validate);
            counts = !(takes_interruption<Validate> && this->interrupted());
            if (counts) observe(metrics);
            else random.restore();  // it is repeated after a resume
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
    this->book();
    progress_.metric = metrics.watched();
    progress_.metric_step = progress_.step;
    this->place_.checked();
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
    this->book();
    if (!keeps_best() || !best_.kept() || best_check() < 0) return false;
    if (!this->trained_.kept()) this->trained_.keep(model_, optimizer_);
    best_.restore(model_, optimizer_);
    this->begun_ = false;
    return true;
  }
  // What ends a fit() before its first epoch leaves the model in training mode too.
  StopReason or_train_mode(auto&& body) {
    try {
      const StopReason reason = body();
      if (reason != StopReason::none) train_mode(model_);
      return reason;
    } catch (...) {
      train_mode(model_);
      throw;
    }
  }
  // What a run leaves in the model: the best weights, else the averaged ones, else the last ones. The next step, also that
  // of a resumed run, continues on the weights that were being trained.
  void leave_best() {
    this->book();                       // on the weights that it is about
    if (this->trained_.kept()) return;  // it has them since the run ended; what the user did to them since is his
    if (restored_best() || averaging().swapped() || !averaging().averaging()) return;
    averaging().swap(model_);
    this->begun_ = false;
  }

  // A new epoch, or the rest of one that was interrupted. Steps made by hand outside of fit() are in no epoch of these
  // batches: it starts at its first one.
  void enter_epoch(const auto& batches) {
    if (this->stage_ == EpochStage::outside) progress_.micro_batch = 0;
    this->stage_ = EpochStage::entered;
    if (progress_.micro_batch == 0) return this->place_.enter(batches, this->accumulation().pending());
    if (!this->place_.reenter(batches, progress_, this->accumulation().pending())) return;
    this->accumulation().finish();  // the window starts again
    optimizer_.zero_grad();
    this->loss_log_.reset();
  }
  // A range that cannot start in the middle is drawn again from where its random numbers began, and the consumed batches
  // are dropped: exact wherever its order comes from the default generators.
  auto first_of(auto& range, std::int64_t consumed) {
    if (consumed == 0) return range.begin();
    const auto now = Base::Random::now();
    if constexpr (!absent<Role::checkpointing>) this->place_.at_epoch_start().restore();
    for (auto at = range.begin(); at != range.end(); ++at) {
      static_cast<void>(*at);
      if (--consumed > 0) continue;
      now.restore();
      ++at;
      return at;
    }
    throw std::invalid_argument(
        "Trainer: the batches end before the position of the checkpoint. Pass the same batches.");
  }
  // Whether the batch at `at` was the last one. Batches that do not know are asked for the next one; what that draws leaves
  // no trace, since it is drawn again when the run goes on.
  template <class Batches>
  bool ends_epoch(const Batches& batches, auto& range, auto& at) {
    if constexpr (Fingerprinted<Batches>) return progress_.micro_batch == batches.size();
    else {
      const auto now = Base::Random::now();
      const bool ends = !(++at != range.end());
      if (!ends) now.restore();
      return ends;
    }
  }
  // What an exception in the last batch, or a checkpoint from there, leaves open in a run that is over: whether the epoch is.
  template <class Batches>
  void look_for_epoch_end(const Batches& batches) {
    std::int64_t size = 0;
    if constexpr (Fingerprinted<Batches>) size = batches.size();
    else size = size_of(batches);
    if (this->stage_ != EpochStage::entered || size == 0 || progress_.micro_batch != size) return;
    enter_epoch(batches);  // they are the same ones, or it throws
    if (progress_.micro_batch == size) this->stage_ = EpochStage::through;
  }
  bool carries() {
    if constexpr (requires { this->accumulation().at_epoch_end(); })
      return this->accumulation().at_epoch_end() == AtEpochEnd::carry;
    else return false;
  }

  // Validates and saves, if a window was finished and they are due. False: interrupted during the validation.
  bool after_window(StepResult result, auto& validate, const FitOptions& options) {
    if (result == StepResult::accumulated) return true;
    this->book_if_asked(options);
    if (this->check_due(options) && !validated(validate)) return false;
    save_if_due();
    return true;
  }
  // The check and the save that an exception or an interruption took from the last window, or from the last epoch its save.
  StopReason make_up(auto& validate, const FitOptions& options) {
    if (this->check_due(options) && !validated(validate)) return StopReason::preempted;
    if (moved_ && !this->accumulation().pending()) save_if_due();
    return this->stop_reason(options);
  }
};

}  // namespace frugal::inline v0::detail
