#pragma once

#include <frugal/detail/rehearsal.hpp>
#include <frugal/detail/run_memory.hpp>
#include <frugal/policy.hpp>

#include <exception>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

namespace frugal::inline v0::detail {

// When and what a Trainer saves.
template <class Model, class Optimizer, class Loss, class... Policies>
class Saves : protected Rehearsal<Model, Optimizer, Loss, Policies...> {
  using Base = Rehearsal<Model, Optimizer, Loss, Policies...>;

 protected:
  using typename Base::Composed;
  template <Role R>
  static constexpr bool absent = Composed::template absent<R>;

  using Base::Base;
  using Base::checkpointing, Base::model_, Base::optimizer_, Base::phase, Base::progress_;

  // Calls call(memory, policies with state...).
  auto with_state(auto&& call) {
    const auto stateful = [](auto& policy) {
      if constexpr (Stateful<std::remove_cvref_t<decltype(policy)>>) return std::tie(policy);
      else return std::tuple<>{};
    };
    RunMemory memory{this->loss_log_, this->best_,  this->trained_,
                     this->place_,    this->stage_, this->accumulation().pending()};
    return std::apply(
        [&](auto&... policy) { return call(memory, policy...); },
        std::apply([&](auto&... policy) { return std::tuple_cat(stateful(policy)...); }, this->policies_));
  }

  bool resumed() {
    if constexpr (absent<Role::checkpointing>) return false;
    else {
      const std::exception_ptr of_this_run = this->book_quietly();
      const auto found = with_state([&](auto&... state) -> std::optional<Progress> {
        return checkpointing().restore(model_, optimizer_, state...);
      });
      if (!found && of_this_run) std::rethrow_exception(of_this_run);
      if (!found) return false;
      progress_ = *found;
      this->place_.resumed();
      note_saved();
      this->begun_ = this->moved_ = false;
      return true;
    }
  }

  void save_if_due() {
    if (checkpointing().due(std::as_const(progress_)) || measured_since_save()) save_now();
  }
  // A file that was due before the check of its step does not know how good its weights are: it is written again.
  bool measured_since_save() const {
    if constexpr (absent<Role::checkpointing>) return false;
    else return this->saving_.unmeasured >= 0 && this->saving_.unmeasured == progress_.metric_step;
  }
  void note_saved() {
    if constexpr (!absent<Role::checkpointing>)
      this->saving_.unmeasured = progress_.metric_step == progress_.step ? -1 : progress_.step;
  }
  void save_now() {
    if constexpr (!absent<Role::checkpointing>)
      if (this->saving_.midway)
        throw std::invalid_argument(
            "Trainer: save() inside a backward pass or an update, where nothing could go on from. Call it in on_step, "
            "in on_epoch or between steps.");
    if constexpr (!absent<Role::checkpointing> && Composed::template fits<Role::checkpointing>) {
      phase(Phase::save);
      this->book();
      this->read_loss();
      with_state([&](auto&... state) { checkpointing().save(std::as_const(progress_), model_, optimizer_, state...); });
      note_saved();
    }
    this->moved_ = false;
  }

  // Nothing is in flight. What could not be written is still to be saved.
  void wait_for_save() {
    try {
      checkpointing().wait();
    } catch (...) {
      this->moved();
      throw;
    }
  }
};

}  // namespace frugal::inline v0::detail
