#pragma once

#include <frugal/detail/checks.hpp>
#include <frugal/detail/evaluation.hpp>
#include <frugal/observers.hpp>
#include <frugal/policy.hpp>
#include <frugal/run.hpp>
#include <frugal/update.hpp>

#include <chrono>
#include <concepts>
#include <exception>
#include <tuple>
#include <type_traits>
#include <utility>

namespace frugal::inline v0 {

/// Runs the loop around a model with any set of policies, in any order, composed at compile time: an absent policy costs
/// no instruction, no byte and no allocation.
///
///     Trainer trainer{model, optimizer, loss, AmpPolicy<Auto>(device), GradAccumulator(4), EarlyStopper({.patience = 3})};
///     RunReport report = trainer.fit(batches, [&] { return loss_on(model, held_out); }, {.epochs = 20});
///
/// Model and optimizer are referenced and must outlive the Trainer; loss and policies are moved into it. `loss(Model&,
/// const Batch&)` returns a mean loss, or Weighted{mean loss, samples or tokens}. What happens when: read step() and, from
/// fit() on, train(), epoch(), micro_batches(); what they ask is in detail/endings.hpp, what they do in detail/checks.hpp.
///
/// What throws in a backward pass or an update drops its window. What throws afterwards, an observer's on_step say, leaves
/// the step applied and counted: the next fit() makes up for the check and the save that were due, and goes on.
///
/// A policy's verbs, by role, are the concepts in policy.hpp. Optional ones: accumulation `at_epoch_end`; schedule
/// `observe(metric)`; stopping `best`, `best_at`, `restores_best`. Any policy may have an observer's hooks:
/// `on_gradients(Model&)`, `on_step(const Progress&)`, `on_skip(const Progress&)`, `on_epoch(const Progress&)`, which may
/// take `const Readings&` too, `on_phase(Phase)`, and `on_end(const Progress&)` when fit() returns. An observer may say
/// `bool due(const Progress&) const`: whether on_step wants this step; `static constexpr bool reads_loss = true`:
/// Progress::loss is read for it, one device sync; `StopReason stop() const`: asked after every micro-batch and epoch.
/// Any policy may have `void readings(auto& out) const`, `save` and `load` (Stateful), `void reset()` for restart().
template <class Model, class Optimizer, class Loss, class... Policies>
class Trainer : detail::Checks<Model, Optimizer, Loss, Policies...> {
  using Base = detail::Checks<Model, Optimizer, Loss, Policies...>;
  using Base::accumulation, Base::begun_, Base::clipping, Base::checkpointing, Base::each_policy, Base::model_,
      Base::moved_, Base::optimizer_, Base::phase, Base::precision, Base::progress_, Base::read_loss, Base::readings,
      Base::save_if_due, Base::stop_reason, Base::updating, Base::validated;
  using typename Base::Composed;

 public:
  Trainer(Model& model, Optimizer& optimizer, Loss loss, Policies... policies)
      : Base(model, optimizer, std::move(loss), std::move(policies)...) {}

  /// One micro-batch: forward, backward and, when the window is full, one update. Leaves the model's mode alone.
  template <class Batch>
  StepResult step(const Batch& batch) {
    constexpr bool callable = std::invocable<Loss&, Model&, const Batch&>;
    constexpr bool swapped =  // not asked of one that fits: a generic one may not survive the question
        std::conjunction_v<std::bool_constant<!callable>, std::is_invocable<Loss&, const Batch&, Model&>>;
    static_assert(!swapped,
                  "Trainer: the loss function takes the batch first. Write `loss(Model&, const Batch&)`: the model, "
                  "then the batch.");
    static_assert(callable || swapped,
                  "Trainer: the loss function does not fit. Write `loss(Model&, const Batch&)` that returns a "
                  "mean loss or Weighted{mean loss, samples or tokens}.");
    if (!begun_) this->begin();
    if constexpr (!callable) return StepResult::accumulated;
    else if constexpr (Composed::needs_closure) return this->step_with_closure(batch);
    else {
      phase(Phase::forward);
      this->place_.forward();
      auto [loss, weight] = this->evaluate(batch);
      phase(Phase::backward);
      const bool full = this->or_drop_window([&] { return this->backward(loss, weight, accumulation()); });
      this->consumed(batch, loss, weight);
      return full ? update_weights() : StepResult::accumulated;
    }
  }

  /// Steps on the unfinished window, exactly weighted. accumulated: there was none.
  StepResult flush() {
    if constexpr (!Composed::needs_closure)
      if (accumulation().pending()) {
        const StepResult result = update_weights(), late = this->book();
        return late == StepResult::accumulated ? result : late;
      }
    this->book();
    accumulation().finish();  // micro-batches without a sample or token: a window, but no gradient
    return StepResult::accumulated;
  }

  /// Trains until a limit of the options, the stopping policy, an observer or an interruption ends the run.
  /// Unless it diverged or was interrupted, the last weights are validated. An epoch without a sample to train on is an error.
  ///
  /// `batches` is a range of batches (a container, `*data_loader`), or has `epoch(epoch, consumed)` that returns one
  /// (Batches). `validate()` runs with the model in eval mode, without gradients and, with an Averager, on the averaged
  /// weights; it returns a number, a 0-dim tensor or Metrics. A `validate(interruption)` gets the interruption policy and
  /// may return early; what it returns then does not count.
  ///
  /// A limit that falls on the last window of an epoch ends that epoch as well: it is checked, counted and saved. Steps made
  /// by hand before count as steps and samples; an epoch that no fit() entered starts at its first batch.
  ///
  /// When it returns, or throws, the model is in training mode and holds the best weights if the stopping policy restores
  /// them, else the averaged ones if there is an Averager; the next step goes on with those that were being trained. A run
  /// that is over returns at once, leaves the weights alone and warns; restart() begins a new one.
  template <class Batches, class Validate>
    requires(!std::same_as<std::remove_cvref_t<Validate>, FitOptions>)
  RunReport fit(Batches&& batches, Validate&& validate, FitOptions options = {}) {
    return run(batches, validate, options);
  }
  /// The same without validation.
  template <class Batches>
  RunReport fit(Batches&& batches, FitOptions options = {}) {
    detail::NoValidation none;
    return run(batches, none, options);
  }

  /// One check, for loops that you own: tells schedule and stopping policy of the metric, keeps the weights that the model
  /// holds now if it is the best check, saves if due. Stop when it returns anything but `none`.
  StopReason check(const Metrics& metrics) {
    this->observe(metrics);
    save_if_due();
    return this->stopping().reason();
  }
  /// Brings the best weights back, as fit() does at its end. False: there are none.
  bool restore_best() { return this->restored_best(); }

  /// Continues from the newest valid checkpoint: model, optimizer, every policy with state, random numbers, position in the
  /// data. False: there is none (or checkpoints are switched off) and nothing was changed. Throws when the checkpoint is of
  /// another model or run, before anything was changed.
  bool resume() {
    static_assert(!Base::template absent<Role::checkpointing>, "Trainer: resume() has no CheckpointManager. Pass one.");
    return this->resumed();
  }
  /// Saves now, due or not; returns when the state is copied. Throws inside a backward pass or an update (on_gradients).
  void save() {
    static_assert(!Base::template absent<Role::checkpointing>, "Trainer: save() has no CheckpointManager. Pass one.");
    this->save_now();
  }

  /// Has the AmpPolicy compute as is measured to be the fastest for this model here, on a batch of the usual size; nothing
  /// else changes. See calibration.hpp, which must be included. `if (!trainer.resume()) trainer.calibrate(batch);`
  auto calibrate(const auto& batch, const auto&... options) { return this->calibrated(batch, options...); }

  /// Begins a new run on the weights that the model holds: Progress and policies are as new. The optimizer keeps its state.
  void restart() { this->renew(); }

  /// The policy of that type.
  template <class Type>
  Type& get() {
    constexpr bool passed = (std::same_as<Type, Policies> || ...);
    static_assert(passed, "Trainer: get<Policy>() asks for a policy that was not passed.");
    if constexpr (detail::plays<Role::averaging, Type>) this->book();
    if constexpr (passed) return std::get<Type>(this->policies_);
    else std::terminate();  // without a second error
  }
  /// Where the run stands. Reads the last window's loss: one device sync per window at most. Books a step whose answer is late.
  const Progress& progress() const {
    const_cast<Trainer*>(this)->book();  // no Trainer is a constant one: step() has to be called
    read_loss();
    return progress_;
  }

 private:
  StepResult update_weights() {
    return this->closed(this->or_drop_window([&] {
      phase(Phase::update);
      this->book();  // the step before this one, if its answer came late
      return detail::update_window(optimizer_, precision(), accumulation(), clipping(), updating(), this->watch());
    }));
  }

  template <class Batches, class Validate>
  RunReport run(Batches& batches, Validate& validate, const FitOptions& options) {
    constexpr bool iterable = detail::Positioned<Batches> || detail::PlainRange<Batches>;
    static_assert(iterable,
                  "Trainer: fit() cannot iterate over the batches. Pass a range (a container, `*data_loader`) or "
                  "Batches.");
    const auto started = std::chrono::steady_clock::now();
    StopReason reason = this->or_train_mode([&] {
      this->book();
      Base::template expect<Validate>(options);
      return stop_reason(options);
    });
    if (reason != StopReason::none) this->look_for_epoch_end(batches);
    const bool checks = detail::validates<Validate> && this->unchecked(reason);
    if (!checks && !this->owes(reason)) this->say_if_over(reason);
    detail::and_always(
        [&] {
          if constexpr (iterable)
            if (reason == StopReason::none || checks || moved_ || this->owes(reason))
              reason = train(batches, validate, options);
        },
        [&] { this->leave_best(); });
    read_loss();
    each_policy([&](auto& policy) { detail::call_on_end(policy, std::as_const(progress_)); });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    return {progress_, reason, this->best_metric(), seconds.count()};
  }

  StopReason train(auto& batches, auto& validate, const FitOptions& options) {
    if (!begun_) this->or_train_mode([&] { return this->begin(), StopReason::none; });
    StopReason reason = stop_reason(options);
    if (reason == StopReason::none || this->epoch_end_due(reason)) reason = this->make_up(validate, options);
    if (this->epoch_end_due(reason)) reason = end_epoch(validate, options, reason);
    while (reason == StopReason::none) reason = epoch(batches, validate, options);
    if (reason != StopReason::preempted) flush();  // an interrupted window is saved with its gradients instead
    if (this->unchecked(reason)) reason = validated(validate) ? this->verdict_or(reason) : StopReason::preempted;
    if (moved_) this->save_now();
    this->wait_for_save();
    return reason;
  }

  StopReason epoch(auto& batches, auto& validate, const FitOptions& options) {
    detail::train_mode(model_);
    const StopReason reason = micro_batches(batches, validate, options);
    return this->epoch_end_due(reason) ? end_epoch(validate, options, reason) : reason;
  }

  // What the running epoch has left. Ends with the batches, or for the reason that it returns, or both.
  StopReason micro_batches(auto& batches, auto& validate, const FitOptions& options) {
    this->enter_epoch(batches);
    const Progress before = progress_;
    phase(Phase::data);
    auto&& [range, consumed] = detail::rest_of_epoch(batches, progress_);
    StopReason reason = StopReason::none;
    for (auto at = this->first_of(range, consumed); at != range.end(); ++at, phase(Phase::data)) {
      reason = this->after_window(step(*at), validate, options) ? stop_reason(options) : StopReason::preempted;
      if (reason == StopReason::none) continue;
      this->book();
      if (this->ends_epoch(batches, range, at)) break;
      return reason;
    }
    this->book();
    if (reason == StopReason::none) this->expect_training_since(before);
    this->stage_ = detail::EpochStage::through;
    return reason;
  }

  StopReason end_epoch(auto& validate, const FitOptions& options, StopReason reason) {
    const bool last = progress_.epoch + 1 == options.epochs;
    if (last || !this->carries())
      if (!this->after_window(flush(), validate, options)) return StopReason::preempted;
    if (this->check_due_at_epoch_end(options, reason) && !validated(validate)) return StopReason::preempted;
    this->count_epoch();
    each_policy([&](auto& policy) { detail::call_on_epoch(policy, std::as_const(progress_), readings()); });
    save_if_due();  // last, so that patience, scale and rate are in the file
    const StopReason now = stop_reason(options);
    return now == StopReason::none ? reason : now;
  }
};

}  // namespace frugal::inline v0
