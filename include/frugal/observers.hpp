#pragma once

#include <frugal/policy.hpp>

#include <cstdint>

/// Observers from a callable, without a class. A class of your own comes in by the same door: give it
/// `static constexpr frugal::Role role = frugal::Role::observer` and any of the hooks that Trainer lists.
namespace frugal::inline v0 {

/// Sees the model before every update, when its gradients are unscaled and not yet clipped; on an overflow they hold inf.
///
///     OnGradients{[](Net& model) { ... }}
///
/// The callable may take `const Readings&` as a second argument, as in all of these.
template <class Hook>
struct OnGradients {
  static constexpr Role role = Role::observer;
  [[no_unique_address]] Hook on_gradients;
};
template <class Hook>
OnGradients(Hook) -> OnGradients<Hook>;

/// Is called after every `every`-th applied optimizer step; 0: never. The loss is read for it, and the answer of a step that
/// comes late (SkipDecision::lagged): one device sync each time.
///
///     OnStep{[](const Progress& at) { std::cout << at.step << ' ' << at.loss << '\n'; }, 100}
template <class Hook>
struct OnStep {
  static constexpr Role role = Role::observer;
  static constexpr bool reads_loss = true;
  [[no_unique_address]] Hook on_step;
  std::int64_t every = 1;
  bool due(const Progress& at) const { return every > 0 && at.step % every == 0; }
};
template <class Hook>
OnStep(Hook) -> OnStep<Hook>;
template <class Hook>
OnStep(Hook, std::int64_t) -> OnStep<Hook>;

/// Is called at the end of every epoch, after the validation and before the checkpoint.
///
///     OnEpoch{[](const Progress& at) { std::cout << at.epoch << ' ' << at.metric << '\n'; }}
template <class Hook>
struct OnEpoch {
  static constexpr Role role = Role::observer;
  [[no_unique_address]] Hook on_epoch;
};
template <class Hook>
OnEpoch(Hook) -> OnEpoch<Hook>;

}  // namespace frugal::inline v0
