#pragma once

#include <frugal/policy.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}

// Policies come in any order and are found by role. An empty slot is played by a stateless stand-in whose calls fold
// away, so that the loop reads the same with and without a policy.
namespace frugal::inline v0::detail {

template <Role R, class Type>
constexpr bool plays = [] {
  if constexpr (Policy<std::remove_cvref_t<Type>>) return std::remove_cvref_t<Type>::role == R;
  else return false;
}();

template <Role R, class... Types>
constexpr int count = (0 + ... + int{plays<R, Types>});

// Index of the policy in a role; the number of policies when the slot is empty.
template <Role R, class... Types>
constexpr std::size_t find = [] {
  constexpr bool hits[] = {plays<R, Types>..., true};
  std::size_t i = 0;
  while (!hits[i]) ++i;
  return i;
}();

struct Nothing {};

struct PendingScale;  // pending.hpp: what the gradients of a window must still be multiplied by before the step

// A precision or clipping policy that can leave gradients as they are, and note in the PendingScale `optimizer.pending` what
// it would have multiplied them by, says so with a member type `Defers`: its own class, since one that is derived from it may
// look at gradients in between.
template <class Type>
constexpr bool defers = false;
template <class Type>
  requires std::same_as<typename Type::Defers, Type>
constexpr bool defers<Type> = true;

// Multiplies every gradient. Only an uneven window without a precision policy comes here.
void multiply_gradients(auto& optimizer, double factor) {
  if constexpr (requires { optimizer.param_groups(); }) {
    const auto identity = [](const auto& parameter) -> const void* {
      if constexpr (requires { parameter.unsafeGetTensorImpl(); }) return parameter.unsafeGetTensorImpl();
      else return &parameter;
    };
    std::vector<const void*> seen;  // a tied parameter that is listed twice has one gradient
    for (auto& group : optimizer.param_groups())
      for (auto& parameter : group.params())
        if (parameter.grad().defined() && std::ranges::find(seen, identity(parameter)) == seen.end()) {
          seen.push_back(identity(parameter));
          parameter.mutable_grad().mul_(factor);
        }
  } else if constexpr (requires { optimizer.multiply_gradients(factor); }) {
    optimizer.multiply_gradients(factor);
  } else {
    throw std::invalid_argument(
        "frugal: this optimizer does not show its parameters, so an uneven window cannot be normalised. Give it "
        "param_groups() or multiply_gradients(factor).");
  }
}

template <class Class>
std::type_identity<Class> owner_of(void (Class::*)(bool));
// Whether the optimizer's zero_grad() is LibTorch's own.
template <class Optimizer>
constexpr bool zeroes_as_torch = requires {
  requires std::same_as<decltype(owner_of(&Optimizer::zero_grad)), std::type_identity<torch::optim::Optimizer>>;
};

// zero_grad(). LibTorch's cuts every gradient off from a graph before it drops it, which costs an operator and an allocation for
// each.
template <class Optimizer>
void drop_gradients(Optimizer& optimizer) {
  if constexpr (zeroes_as_torch<Optimizer>) {
    for (auto& group : optimizer.param_groups())
      for (auto& parameter : group.params()) parameter.mutable_grad().reset();
  } else {
    optimizer.zero_grad();
  }
}

struct FullPrecision {
  static constexpr Role role = Role::precision;
  using Defers = FullPrecision;
  struct Guard {};
  static Guard autocast() { return {}; }
  static auto&& scale(auto&& loss) { return std::forward<decltype(loss)>(loss); }
  static void unscale(auto& optimizer, double factor) {
    if constexpr (requires { optimizer.pending.factor; }) optimizer.pending.factor *= factor;
    else if (factor != 1.0) multiply_gradients(optimizer, factor);
  }
  static bool step(auto& optimizer) {
    optimizer.step();
    return true;
  }
};

struct EveryBatch {
  static constexpr Role role = Role::accumulation;
  static bool backward(auto&& loss, double weight) {
    if (weight == 0.0) return false;  // a mean over nothing is NaN: it must not reach the gradients
    loss.backward();
    return true;
  }
  static constexpr double factor() { return 1.0; }
  static constexpr bool pending() { return false; }
  static void finish() {}
};

struct NoClipping {
  static constexpr Role role = Role::clipping;
  using Defers = NoClipping;
  static void clip(auto&) {}
};

struct PlainStep {
  static constexpr Role role = Role::update;
  static void step(auto& optimizer) { optimizer.step(); }
};

struct ConstantRate {
  static constexpr Role role = Role::schedule;
  static void apply(auto&, std::int64_t) {}
};

struct NoAverage {
  static constexpr Role role = Role::averaging;
  static void update(auto&) {}
  static void swap(auto&) {}
  static constexpr bool averaging() { return false; }
  static constexpr bool swapped() { return false; }
};

struct NeverStop {
  static constexpr Role role = Role::stopping;
  static Verdict observe(double) { return Verdict::waiting; }
  static constexpr StopReason reason() { return StopReason::none; }
};

struct NoCheckpoints {
  static constexpr Role role = Role::checkpointing;
  static constexpr bool due(const Progress&) { return false; }
  static void save(const Progress&, auto&...) {}
  static std::optional<Progress> restore(auto&...) { return std::nullopt; }
  static void wait() {}
};

struct NeverInterrupted {
  static constexpr Role role = Role::interruption;
  static constexpr bool requested() { return false; }
};

template <Role R>
constexpr auto stand_in() {
  if constexpr (R == Role::precision) return FullPrecision{};
  else if constexpr (R == Role::accumulation) return EveryBatch{};
  else if constexpr (R == Role::clipping) return NoClipping{};
  else if constexpr (R == Role::update) return PlainStep{};
  else if constexpr (R == Role::schedule) return ConstantRate{};
  else if constexpr (R == Role::averaging) return NoAverage{};
  else if constexpr (R == Role::stopping) return NeverStop{};
  else if constexpr (R == Role::checkpointing) return NoCheckpoints{};
  else if constexpr (R == Role::interruption) return NeverInterrupted{};
  else return Nothing{};
}
template <Role R>
inline constinit auto empty_slot = stand_in<R>();

// The policy in a role, or its stand-in: when the slot is empty, and when `Usable` says that the policy lacks a verb. A
// class-level assertion has spoken by then, and no second error may follow it.
template <Role R, bool Usable = true, class... Types>
constexpr auto& slot(std::tuple<Types...>& policies) {
  if constexpr (constexpr std::size_t i = find<R, Types...>; Usable && i < sizeof...(Types))
    return std::get<i>(policies);
  else return empty_slot<R>;
}

// An optimizer whose step() is the update policy's: how precision and update meet without knowing each other.
template <class Optimizer, class Update>
struct SteppedBy {
  Optimizer& optimizer;
  Update& update;

  void step() { update.step(optimizer); }
  decltype(auto) param_groups()
    requires requires(Optimizer& shown) { shown.param_groups(); }
  {
    return optimizer.param_groups();
  }
  void multiply_gradients(double factor)
    requires requires(Optimizer& shown) { shown.multiply_gradients(factor); }
  {
    optimizer.multiply_gradients(factor);
  }
};

// The same, where the update policy applies what the gradients must still be multiplied by.
template <class Optimizer, class Update, class Pending = PendingScale>
struct SteppedLater : SteppedBy<Optimizer, Update> {
  Pending pending = {};

  static constexpr bool revocable =
      requires(Update& update, Optimizer& stepped) { update.conclude(stepped, true); };  // see update.hpp

  void step() { this->update.step(this->optimizer, pending); }
};

// Whether nobody needs the gradients themselves between backward and step: the update policy takes what is pending,
// precision and clipping add to it, and `Watch`, a function, is empty, so that there is nobody whom it could tell.
template <class Optimizer, class Precision, class Clipping, class Update, class Watch>
constexpr bool steps_later = [] {
  if constexpr (defers<Precision> && defers<Clipping> && std::is_empty_v<Watch>)
    return requires(Optimizer& optimizer, Update& update, PendingScale& pending) { update.step(optimizer, pending); };
  else return false;
}();

}  // namespace frugal::inline v0::detail
