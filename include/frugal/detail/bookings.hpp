#pragma once

#include <frugal/detail/evaluation.hpp>
#include <frugal/detail/hooks.hpp>
#include <frugal/detail/parts.hpp>
#include <frugal/policy.hpp>
#include <frugal/update.hpp>

#include <exception>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace frugal::inline v0::detail {

// What happens when a window has been stepped or skipped, and when that is known.
template <class Model, class Optimizer, class Loss, class... Policies>
class Bookings : protected Parts<Model, Optimizer, Loss, Policies...> {
  using Base = Parts<Model, Optimizer, Loss, Policies...>;

 protected:
  using Base::averaging, Base::each_policy, Base::loss_log_, Base::model_, Base::optimizer_, Base::place_,
      Base::precision, Base::progress_, Base::readings, Base::schedule, Base::updating;
  using Base::Base;

  // An optimizer with a closure (LBFGS) evaluates the batch as often as it likes. The first evaluation happens outside, so
  // that a batch without a sample or token never reaches it.
  StepResult step_with_closure(const auto& batch) {
    place_.forward();
    auto first = std::optional(this->evaluate(batch));
    const auto loss_of_first = std::as_const(*first).loss;
    const double weight = first->weight;
    if (weight != 0)
      optimizer_.step([&] {
        optimizer_.zero_grad();
        auto loss = first ? std::exchange(first, std::nullopt)->loss : this->evaluate(batch).loss;
        loss.backward();
        return loss;
      });
    this->consumed(batch, loss_of_first, weight);
    if (weight == 0) return StepResult::accumulated;
    and_always(this->watch(),
               [&] { optimizer_.zero_grad(), closed(StepResult::applied); });  // it is, whatever they say
    return StepResult::applied;
  }

  // Ends the window. A step whose answer comes late is booked at the next update, or when somebody asks before.
  StepResult closed(StepResult result) {
    loss_log_.close();
    place_.close(progress_);
    this->moved();
    if constexpr (answers_late)
      if (unanswered()) {
        unbooked_ = true;
        return asked_about_next_step() ? book() : result;
      }
    return booked(result);
  }
  // Books the last step, if it is not, once its answer is there.
  StepResult book() {
    if constexpr (answers_late)
      if (std::exchange(unbooked_, false)) {
        const StepResult result = answered(optimizer_, precision(), updating());
        if (result != StepResult::accumulated) return booked(result);
        throw std::logic_error(
            "Trainer: somebody else took the answer of the last step (settle(), a reset() or load() of the AmpPolicy, "
            "another first parameter of the optimizer), so it is not counted. Ask progress() instead, and reset by "
            "restart().");
      }
    return StepResult::accumulated;
  }
  // The same, before the run may be given up for another one. What is thrown (an observer, too many skips) is about this one.
  std::exception_ptr book_quietly() {
    try {
      book();
      return nullptr;
    } catch (...) { return std::current_exception(); }
  }
  bool unanswered() {
    if constexpr (answers_late) return precision().unanswered(optimizer_);
    else return false;
  }
  Progress next_step() const {
    Progress next = progress_;
    ++next.step;
    return next;
  }
  // Whether an observer wants the step that is not booked, or may end the run over a skip.
  bool asked_about_next_step() {
    bool asked = false;
    each_policy([&](auto& policy) {
      using Type = std::remove_cvref_t<decltype(policy)>;
      if constexpr (WatchesSteps<Type>) asked = asked || wants(policy, next_step());
      if constexpr (WatchesSkips<Type> && AsksToStop<Type>) asked = true;
    });
    return asked;
  }

  // Books what an update did and tells the observers; everything here but on_skip happens to applied steps only.
  StepResult booked(StepResult result) {
    if (result == StepResult::skipped) {
      ++progress_.skipped;
      each_policy([&](auto& policy) { call_on_skip(policy, std::as_const(progress_), readings()); });
      return result;
    }
    ++progress_.step;
    schedule().apply(optimizer_, progress_.step);  // the rate of the next step
    averaging().update(model_);
    each_policy([&](auto& policy) { tell_step(policy); });
    return result;
  }
  template <class Type>
  void tell_step(Type& policy) {
    if constexpr (WatchesSteps<Type>) {
      if (!wants(policy, std::as_const(progress_))) return;
      if constexpr (detail::reads_loss<Type>) this->read_loss();
      call_on_step(policy, std::as_const(progress_), readings());
    }
  }

 private:
  // A precision policy whose step() may say more later (AmpPolicy).
  static constexpr bool answers_late = requires(typename Base::Composed::template In<Role::precision>& policy,
                                                Optimizer& stepped) { policy.unanswered(stepped); };

  struct AllBooked {};
  [[no_unique_address]] std::conditional_t<answers_late, bool, AllBooked> unbooked_{};
};

}  // namespace frugal::inline v0::detail
