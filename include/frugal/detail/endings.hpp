#pragma once

#include <frugal/detail/evaluation.hpp>
#include <frugal/detail/saves.hpp>
#include <frugal/policy.hpp>
#include <frugal/run.hpp>

#include <c10/util/Exception.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace frugal::inline v0::detail {

// When a run ends, why, and what is due until then.
template <class Model, class Optimizer, class Loss, class... Policies>
class Endings : protected Saves<Model, Optimizer, Loss, Policies...> {
  using Base = Saves<Model, Optimizer, Loss, Policies...>;

 protected:
  template <Role R>
  static constexpr bool absent = Base::Composed::template absent<R>;

  using Base::Base;
  using Base::each_policy, Base::interruption, Base::progress_, Base::stopping;

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

  void say_if_over(StopReason reason) const {
    if (reason == StopReason::none || reason == StopReason::preempted) return;
    TORCH_WARN("Trainer: this run is over (", to_string(reason), " after ", progress_.epoch, " epochs and ",
               progress_.step, " steps), fit() trains nothing. Raise the limits, or call restart() for a new run.");
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

  // Whether these weights have a check to come. That hangs on the books alone, which every checkpoint has: so a check that
  // an exception or an interruption prevented, or that comes after a save in on_step, is still due.
  static bool check_due(const Progress& at, const FitOptions& options) {
    const std::int64_t every = options.validate_every_steps;
    return every > 0 && at.step > 0 && at.step % every == 0 && at.metric_step != at.step;
  }
  bool check_due(const FitOptions& options) const { return check_due(progress_, options); }
  // Books a step whose answer comes late now if anything hangs on it.
  void book_if_asked(const FitOptions& options) {
    if (!this->unanswered()) return;
    const Progress next = this->next_step();
    if (is_finished(next, options) || check_due(next, options) || this->checkpointing().due(next)) this->book();
  }
  // Whether a run that ends for this reason leaves weights that are worth a check and had none. One that diverged does not;
  // an interrupted one goes on; a stopping policy has had the check that it decided by.
  bool unchecked(StopReason reason) {
    if (reason == StopReason::none || reason == StopReason::preempted || reason == StopReason::diverged ||
        reason == StopReason::non_finite || stopping().reason() != StopReason::none)
      return false;
    return progress_.step > 0 && progress_.metric_step != progress_.step;
  }
  // Whether the end of the epoch is worth a check of its own: once per weights, and not of those that nobody goes on with.
  bool check_due_at_epoch_end(const FitOptions& options, StopReason reason) {
    if (options.validate_every_steps > 0 || progress_.metric_step == progress_.step) return false;
    return reason == StopReason::none || unchecked(reason);
  }
  // What an interruption or an exception took, and a run that is over still owes beside its last check and save.
  bool owes(StopReason reason) {
    return epoch_end_due(reason) || (reason != StopReason::preempted && this->accumulation().pending());
  }
  // The batches of the epoch are consumed.
  bool epoch_end_due(StopReason reason) const {
    return this->stage_ == EpochStage::through && reason != StopReason::preempted;
  }
  // The last check may be the one that the stopping policy decides by.
  StopReason verdict_or(StopReason reason) {
    return stopping().reason() == StopReason::none ? reason : stopping().reason();
  }

  // Nothing in a whole epoch had weight, so nothing will in the next one.
  void expect_training_since(const Progress& before) {
    if (progress_.micro_batch == 0)
      throw std::invalid_argument("Trainer: epoch " + std::to_string(progress_.epoch) +
                                  " has no batches. Pass a range that can be iterated once per epoch.");
    if (before.micro_batch > 0 || progress_.step > before.step || progress_.skipped > before.skipped ||
        this->accumulation().pending())
      return;
    throw std::invalid_argument("Trainer: epoch " + std::to_string(progress_.epoch) + " has " +
                                std::to_string(progress_.micro_batch) +
                                " batches and none with a sample or token to train on. Look at the weights that the "
                                "loss function or the batches give.");
  }

  // As new, but for the weights and the optimizer.
  void renew() {
    this->book_quietly();
    each_policy([](auto& policy) {
      using Type = std::remove_cvref_t<decltype(policy)>;
      static_assert(
          !Stateful<Type> || requires { policy.reset(); },
          "Trainer: restart() cannot renew a policy that has state. Give it `void reset()`.");
      if constexpr (requires { policy.reset(); }) policy.reset();
    });
    progress_ = {};
    this->stage_ = EpochStage::outside;
    this->loss_log_.reset();
    this->best_.forget(), this->trained_.forget();
    this->place_ = {};  // and the random numbers that a resume left there
    this->saving_ = {};
    this->begun_ = this->moved_ = false;
    if constexpr (Base::keeps_metrics) this->metrics_.reset();
  }
};

}  // namespace frugal::inline v0::detail
