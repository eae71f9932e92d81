#pragma once

#include <frugal/detail/hooks.hpp>
#include <frugal/detail/slots.hpp>
#include <frugal/policy.hpp>

#include <concepts>
#include <cstddef>
#include <tuple>

namespace frugal::inline v0::detail {

template <Role R, class... Policies>
using In = std::tuple_element_t<find<R, Policies...>, std::tuple<Policies..., Nothing>>;

template <class Precision>
constexpr bool can_skip = false;
template <class Precision>
  requires requires {
    requires bool { Precision::can_skip };
  }
constexpr bool can_skip<Precision> = true;

// The verbs of an accumulation policy that do not depend on the loss; Trainer::step asks for the other one.
template <class Type>
concept Windowed = requires(Type& policy, const Type& fixed) {
  { fixed.factor() } -> std::convertible_to<double>;
  { fixed.pending() } -> std::same_as<bool>;
  policy.finish();
};

// What a Trainer can be made of, checked once, one sentence a mistake. A policy that fails its check is replaced by the
// stand-in of its role (`fits`), so that the sentence is the only error.
template <class Model, class Optimizer, class... Policies>
struct Composition {
  template <Role R>
  static constexpr int count = detail::count<R, Policies...>;
  template <Role R>
  static constexpr bool absent = count<R> == 0;
  template <Role R>
  using In = detail::In<R, Policies...>;

  // LBFGS and its like evaluate the batch themselves.
  static constexpr bool needs_closure = !requires(Optimizer& optimizer) { optimizer.step(); };

  template <Role R>
  static constexpr bool fits = [] {
    if constexpr (absent<R>) return true;
    else if constexpr (R == Role::precision) return needs_closure || PrecisionPolicy<In<R>, Optimizer>;
    else if constexpr (R == Role::accumulation) return Windowed<In<R>>;
    else if constexpr (R == Role::clipping) return needs_closure || ClippingPolicy<In<R>, Optimizer>;
    else if constexpr (R == Role::update) return needs_closure || UpdatePolicy<In<R>, Optimizer>;
    else if constexpr (R == Role::schedule) return SchedulePolicy<In<R>, Optimizer>;
    else if constexpr (R == Role::averaging) return AveragingPolicy<In<R>, Model>;
    else if constexpr (R == Role::stopping) return StoppingPolicy<In<R>>;
    else if constexpr (R == Role::checkpointing) return CheckpointingPolicy<In<R>, Model, Optimizer>;
    else if constexpr (R == Role::interruption) return InterruptionPolicy<In<R>>;
    else return true;
  }();

  static_assert((Policy<Policies> && ...),
                "Trainer: every argument after the loss must be a policy or an observer. Give the class a `static "
                "constexpr frugal::Role role`, or wrap a callable in OnEpoch{...}.");

  static_assert(count<Role::precision> <= 1, "Trainer: two precision policies. Pass at most one AmpPolicy.");
  static_assert(count<Role::accumulation> <= 1,
                "Trainer: two accumulation policies. Pass at most one GradAccumulator.");
  static_assert(count<Role::clipping> <= 1, "Trainer: two clipping policies. Pass at most one GradClip.");
  static_assert(count<Role::update> <= 1, "Trainer: two update policies. Pass at most one FusedStep.");
  static_assert(count<Role::schedule> <= 1,
                "Trainer: two schedules. Pass at most one Schedule; multiply the rates inside it.");
  static_assert(count<Role::averaging> <= 1, "Trainer: two averaging policies. Pass at most one Averager.");
  static_assert(count<Role::stopping> <= 1, "Trainer: two stopping policies. Pass at most one EarlyStopper.");
  static_assert(count<Role::checkpointing> <= 1,
                "Trainer: two checkpointing policies. Pass at most one CheckpointManager.");
  static_assert(count<Role::interruption> <= 1, "Trainer: two interruption policies. Pass at most one Preemption.");
  static_assert(count<Role::before_training> == 0,
                "Trainer: BatchSizeProber runs before training. Call plan(), then pass GradAccumulator(plan.steps).");

  static_assert(
      !needs_closure || absent<Role::accumulation>,
      "Trainer: an optimizer that needs a closure (LBFGS) evaluates the batch itself. Drop GradAccumulator, or "
      "use AdamW.");
  static_assert(
      !needs_closure || absent<Role::update>,
      "Trainer: an optimizer that needs a closure (LBFGS) has no fused kernel. Drop FusedStep, or use AdamW.");
  static_assert(!needs_closure || !can_skip<In<Role::precision>>,
                "Trainer: an optimizer that needs a closure (LBFGS) cannot skip an overflow. Use AmpPolicy<Bf16> or "
                "AmpPolicy<Fp32>, or use AdamW.");
  static_assert(!needs_closure || absent<Role::clipping>,
                "Trainer: an optimizer that needs a closure (LBFGS) evaluates gradients itself. Drop GradClip, or use "
                "AdamW.");
  static_assert(!needs_closure || absent<Role::checkpointing>,
                "Trainer: the state of an optimizer that needs a closure (LBFGS) cannot be checkpointed. Drop "
                "CheckpointManager, or use AdamW.");

  static_assert(fits<Role::precision>,
                "Trainer: the precision policy lacks a verb. Write `autocast()`, `scale(loss)`, `void "
                "unscale(optimizer, double factor)` and `bool step(optimizer)`.");
  static_assert(fits<Role::accumulation>,
                "Trainer: the accumulation policy lacks a verb. Write `bool backward(loss, double weight)`, `double "
                "factor() const`, `bool pending() const` and `void finish()`.");
  static_assert(fits<Role::clipping>, "Trainer: the clipping policy lacks its verb. Write `void clip(optimizer)`.");
  static_assert(fits<Role::update>, "Trainer: the update policy lacks its verb. Write `void step(optimizer)`.");
  static_assert(fits<Role::schedule>,
                "Trainer: the schedule lacks its verb. Write `void apply(optimizer, std::int64_t step)`.");
  static_assert(fits<Role::averaging>,
                "Trainer: the averaging policy lacks a verb. Write `void update(model)`, `void swap(model)`, `bool "
                "averaging() const` and `bool swapped() const`.");
  static_assert(fits<Role::stopping>,
                "Trainer: the stopping policy lacks a verb. Write `Verdict observe(double metric)` and `StopReason "
                "reason() const`.");
  static_assert(fits<Role::checkpointing>,
                "Trainer: the checkpointing policy lacks a verb. Write `due(progress)`, `save(progress, model, "
                "optimizer, stateful...)`, `restore(model, optimizer, stateful...)` and `wait()`.");
  static_assert(fits<Role::interruption>,
                "Trainer: the interruption policy lacks its verb. Write `bool requested() const`.");

  static_assert((hooks_fit<Policies, Model> && ...),
                "Trainer: a hook has the wrong signature. Write `on_gradients(Model&)`, `on_step(const Progress&)`, "
                "`on_skip(const Progress&)`, `on_epoch(const Progress&)`, `on_phase(Phase)`, `StopReason stop() const` "
                "or `bool due(const Progress&) const`; all but the last three may take `const Readings&` too.");
  static_assert((!Misspelt<Policies> && ...),
                "Trainer: a hook has a name that nobody calls. The hooks are on_gradients, on_step, on_skip, on_epoch, "
                "on_phase, stop and due.");
  static_assert(((!plays<Role::observer, Policies> || watches<Policies, Model> || Misspelt<Policies>) && ...),
                "Trainer: an observer watches nothing. Give it on_gradients, on_step, on_skip, on_epoch, on_phase or "
                "stop.");
  static_assert((state_fits<Policies> && ...),
                "Trainer: the state of a policy would not be saved. Write both `void save(auto& out) const` and `void "
                "load(auto& in)`.");
  static_assert((readings_fit<Policies> && ...),
                "Trainer: the readings of a policy would not be seen. Write `void readings(auto& out) const`.");
};

}  // namespace frugal::inline v0::detail
