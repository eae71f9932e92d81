#pragma once

#include <frugal/detail/slots.hpp>
#include <frugal/policy.hpp>

#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

/// The middle of the loop, for loops that you own. Any subset of precision, accumulation, clipping and update policies, in
/// any order; the Trainer makes its steps with these two.
///
///     auto loss = [&] { auto guard = amp.autocast(); return model->loss(batch); }();
///     if (frugal::backward(loss, batch.size(), amp, accumulator))
///       frugal::update(optimizer, amp, accumulator, clip);
///
/// At the end of an epoch, `if (accumulator.pending()) frugal::update(...)` steps on the unfinished window.
namespace frugal::inline v0 {

namespace detail {

// What backward() and update() can be called with, checked in one place.
template <class... Policies>
struct Middle {
  static constexpr bool fit = ((plays<Role::precision, Policies> || plays<Role::accumulation, Policies> ||
                                plays<Role::clipping, Policies> || plays<Role::update, Policies>) &&
                               ...);
  static constexpr bool unique = count<Role::precision, Policies...> <= 1 &&
                                 count<Role::accumulation, Policies...> <= 1 &&
                                 count<Role::clipping, Policies...> <= 1 && count<Role::update, Policies...> <= 1;
  static_assert(
      fit,
      "backward, update: only precision, accumulation, clipping and update policies act here. Call the others "
      "yourself, or use Trainer.");
  static_assert(unique, "backward, update: two policies of one role. Pass at most one of each.");
  static constexpr bool sound = fit && unique;
};

// Whether the last step was skipped, where that is learned late; accumulated: it is known.
StepResult answered(auto& optimizer, auto& precision, auto& update) {
  if constexpr (requires { precision.unanswered(optimizer); }) {
    if (!precision.unanswered(optimizer)) return StepResult::accumulated;
    if constexpr (requires { update.conclude(optimizer, true); })
      if (update.is_late(optimizer)) {
        const bool applied = precision.answer(optimizer);
        update.conclude(optimizer, applied);
        precision.conclude();
        return applied ? StepResult::applied : StepResult::skipped;
      }
    throw std::invalid_argument(
        "settle, update: the last step may have to be taken back by the update policy that made it, for the optimizer "
        "that made it. Pass these two; if one of them is gone, amp.answer(optimizer) closes the question.");
  } else {
    return StepResult::accumulated;
  }
}

// The step threw: whether it was skipped is of no interest any more, but for the counts of what it did before.
void forget_answer(auto& optimizer, auto& precision, auto& update) {
  if constexpr (requires { precision.unanswered(optimizer), update.conclude(optimizer, true); })
    if (precision.unanswered(optimizer)) {
      const bool applied = precision.answer(optimizer);
      if (update.is_late(optimizer)) update.conclude(optimizer, applied);
    }
}

// The order of an update. `watch` sees the unscaled gradients before they are clipped. An empty one has nobody to tell: the
// gradients may then stay scaled until the step, which saves the passes over them that only multiply.
template <class Optimizer, class Precision, class Clipping, class Update, class Watch>
StepResult update_window(Optimizer& optimizer, Precision& precision, auto& accumulation, Clipping& clipping,
                         Update& update, const Watch& watch) {
  constexpr bool later = steps_later<Optimizer, Precision, Clipping, Update, Watch>;
  auto stepped = [&] {
    if constexpr (later) return SteppedLater<Optimizer, Update>{{optimizer, update}};
    else return SteppedBy<Optimizer, Update>{optimizer, update};
  }();
  bool applied = false;
  const auto finish = [&] {
    drop_gradients(optimizer);  // at once: the memory is free before the next forward
    accumulation.finish();
  };
  bool begun = false;
  try {
    answered(optimizer, precision, update);
    begun = true;  // until here the answer stays open
    precision.unscale(stepped, accumulation.factor());
    watch();
    if constexpr (later) clipping.clip(stepped);
    else clipping.clip(optimizer);
    applied = precision.step(stepped);
  } catch (...) {  // the window is lost, not half done: the next one starts without gradients
    if (begun) forget_answer(optimizer, precision, update);
    if constexpr (requires { precision.abandon(stepped); }) precision.abandon(stepped);
    finish();
    throw;
  }
  finish();
  return applied ? StepResult::applied : StepResult::skipped;
}

}  // namespace detail

/// Scales, weighs and backpropagates `loss`, the mean over `weight` samples or tokens. True when the window is full: call
/// update() with the same policies before the next backward(). A weight of 0 contributes nothing, whatever the loss is.
/// Throws std::invalid_argument when the weight is negative or not finite, and when a full window was never consumed.
template <class Loss, class Weight, class... Policies>
  requires std::is_arithmetic_v<Weight>
[[nodiscard]] bool backward(Loss&& loss, Weight weight, Policies&... policies) {
  if constexpr (detail::Middle<Policies...>::sound) {
    auto pack = std::tie(policies...);
    auto& precision = detail::slot<Role::precision>(pack);
    return detail::slot<Role::accumulation>(pack).backward(precision.scale(loss), static_cast<double>(weight));
  } else {
    return false;
  }
}

/// An error: there is no weight. (By constant references: any function of yours fits better.)
template <class Loss, class First, class... Policies>
  requires Policy<First>
bool backward(const Loss&, const First&, const Policies&...) {
  static_assert(
      !Policy<First>,
      "backward: the weight is missing. Write `backward(loss, weight, policies...)`: the number of samples or "
      "tokens that the loss is the mean of.");
  return false;
}

/// Makes the window's gradients the true ones (unscaled, the mean over the window), clips them, steps or skips on
/// overflow, zeroes the gradients and closes the window. Never called twice for one window. When something throws on the way,
/// the window is dropped: gradients are zeroed and the next window starts afresh. With SkipDecision::lagged the answer may be open:
/// see settle().
template <class Optimizer, class... Policies>
StepResult update(Optimizer& optimizer, Policies&... policies) {
  if constexpr (detail::Middle<Policies...>::sound) {
    auto pack = std::tie(policies...);
    return detail::update_window(optimizer, detail::slot<Role::precision>(pack), detail::slot<Role::accumulation>(pack),
                                 detail::slot<Role::clipping>(pack), detail::slot<Role::update>(pack), [] {});
  } else {
    return StepResult::accumulated;
  }
}

/// After an update() with the same policies whose answer comes late (SkipDecision::lagged with FusedStep; amp.unanswered()):
/// whether it applied or skipped; the optimizer's counters are right from here on. accumulated: nothing was open. The next
/// update() does it by itself, so call this to hear the answer: before that update, which costs no wait, or at once, before a save,
/// an evaluation, or the end. What counts every step once, in every mode:
///
///     const auto count = [&](StepResult result) { (result == StepResult::applied ? applied : skipped) += 1; };
///     if (const auto last = settle(optimizer, amp, fused); last != StepResult::accumulated) count(last);
///     const auto result = update(optimizer, amp, accumulator, fused);
///     if (!amp.unanswered(optimizer)) count(result);
///
/// Throws std::invalid_argument when the update policy that made the step is not passed.
template <class Optimizer, class... Policies>
StepResult settle(Optimizer& optimizer, Policies&... policies) {
  if constexpr (detail::Middle<Policies...>::sound) {
    auto pack = std::tie(policies...);
    return detail::answered(optimizer, detail::slot<Role::precision>(pack), detail::slot<Role::update>(pack));
  } else {
    return StepResult::accumulated;
  }
}

}  // namespace frugal::inline v0
