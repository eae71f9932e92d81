#pragma once

#include <frugal/detail/slots.hpp>
#include <frugal/policy.hpp>

#include <concepts>
#include <type_traits>

// How observers are called, and how a hook that would silently never be called is found at compile time.
namespace frugal::inline v0::detail {

// `now()` makes the Readings, for hooks that take them: the others do not pay for them.
void call_on_gradients(auto& policy, auto& model, auto&& now) {
  if constexpr (requires(const Readings& some) { policy.on_gradients(model, some); }) policy.on_gradients(model, now());
  else if constexpr (requires { policy.on_gradients(model); }) policy.on_gradients(model);
}
void call_on_step(auto& policy, const Progress& at, auto&& now) {
  if constexpr (requires(const Readings& some) { policy.on_step(at, some); }) policy.on_step(at, now());
  else if constexpr (requires { policy.on_step(at); }) policy.on_step(at);
}
void call_on_skip(auto& policy, const Progress& at, auto&& now) {
  if constexpr (requires(const Readings& some) { policy.on_skip(at, some); }) policy.on_skip(at, now());
  else if constexpr (requires { policy.on_skip(at); }) policy.on_skip(at);
}
void call_on_epoch(auto& policy, const Progress& at, auto&& now) {
  if constexpr (requires(const Readings& some) { policy.on_epoch(at, some); }) policy.on_epoch(at, now());
  else if constexpr (requires { policy.on_epoch(at); }) policy.on_epoch(at);
}

template <class Type, class Model>
concept WatchesGradients = requires(Type& policy, Model& model) {
  policy.on_gradients(model);
} || requires(Type& policy, Model& model, const Readings& now) { policy.on_gradients(model, now); };
template <class Type>
concept WatchesSteps = requires(Type& policy, const Progress& at) { policy.on_step(at); } ||
                       requires(Type& policy, const Progress& at, const Readings& now) { policy.on_step(at, now); };
template <class Type>
concept WatchesSkips = requires(Type& policy, const Progress& at) { policy.on_skip(at); } ||
                       requires(Type& policy, const Progress& at, const Readings& now) { policy.on_skip(at, now); };
template <class Type>
concept WatchesEpochs = requires(Type& policy, const Progress& at) { policy.on_epoch(at); } ||
                        requires(Type& policy, const Progress& at, const Readings& now) { policy.on_epoch(at, now); };
template <class Type>
concept WatchesPhases = requires(Type& policy, Phase phase) { policy.on_phase(phase); };
template <class Type>
concept AsksToStop = requires(const Type& policy) {
  { policy.stop() } -> std::same_as<StopReason>;
};
template <class Type>
concept SaysWhenDue = requires(const Type& policy, const Progress& at) {
  { policy.due(at) } -> std::same_as<bool>;
};

template <class Type, class Model>
constexpr bool takes_readings =
    requires(Type& policy, const Progress& at, const Readings& now) { policy.on_step(at, now); } ||
    requires(Type& policy, const Progress& at, const Readings& now) { policy.on_skip(at, now); } ||
    requires(Type& policy, const Progress& at, const Readings& now) { policy.on_epoch(at, now); } ||
    requires(Type& policy, Model& model, const Readings& now) { policy.on_gradients(model, now); };

// Whether an observer wants this step; one that does not say wants every step.
bool wants(const auto& policy, const Progress& at) {
  if constexpr (SaysWhenDue<std::remove_cvref_t<decltype(policy)>>) return policy.due(at);
  else return true;
}
template <class Type>
constexpr bool reads_loss = false;
template <class Type>
  requires requires {
    requires bool { Type::reads_loss };
  }
constexpr bool reads_loss<Type> = true;

// Whether a class has a member of that name, of whatever shape: beside another member of the same name in a second base
// class the name is ambiguous. `&Type::name` alone would miss overloads and templates.
template <class Type, class Named>
struct Beside : Type, Named {};
template <class Type>
concept Inheritable = std::is_class_v<Type> && !std::is_final_v<Type>;

struct OnGradientsName { int on_gradients; };
struct OnStepName { int on_step; };
struct OnSkipName { int on_skip; };
struct OnEpochName { int on_epoch; };
struct OnPhaseName { int on_phase; };
struct StopName { int stop; };
struct DueName { int due; };
struct SaveName { int save; };
struct LoadName { int load; };
struct ReadingsName { int readings; };

template <class Type>
concept HasOnGradients = Inheritable<Type> && !requires { &Beside<Type, OnGradientsName>::on_gradients; };
template <class Type>
concept HasOnStep = Inheritable<Type> && !requires { &Beside<Type, OnStepName>::on_step; };
template <class Type>
concept HasOnSkip = Inheritable<Type> && !requires { &Beside<Type, OnSkipName>::on_skip; };
template <class Type>
concept HasOnEpoch = Inheritable<Type> && !requires { &Beside<Type, OnEpochName>::on_epoch; };
template <class Type>
concept HasOnPhase = Inheritable<Type> && !requires { &Beside<Type, OnPhaseName>::on_phase; };
template <class Type>
concept HasStop = Inheritable<Type> && !requires { &Beside<Type, StopName>::stop; };
template <class Type>
concept HasDue = Inheritable<Type> && !requires { &Beside<Type, DueName>::due; };
template <class Type>
concept HasSave = Inheritable<Type> && !requires { &Beside<Type, SaveName>::save; };
template <class Type>
concept HasLoad = Inheritable<Type> && !requires { &Beside<Type, LoadName>::load; };
template <class Type>
concept HasReadings = Inheritable<Type> && !requires { &Beside<Type, ReadingsName>::readings; };

// Names that other libraries use, or that slip out of the fingers.
template <class Type>
concept Misspelt =
    requires { &Type::on_gradient; } || requires { &Type::on_grads; } || requires { &Type::on_steps; } ||
    requires { &Type::on_step_end; } || requires { &Type::on_batch; } || requires { &Type::on_batch_end; } ||
    requires { &Type::on_train_batch_end; } || requires { &Type::on_skipped; } || requires { &Type::on_epochs; } ||
    requires { &Type::on_epoch_end; } || requires { &Type::on_train_epoch_end; } ||
    requires { &Type::on_validation; } || requires { &Type::on_validation_end; } || requires { &Type::on_phases; } ||
    requires { &Type::should_stop; };

// Every hook that the class has a member for can be called.
template <class Type, class Model>
constexpr bool hooks_fit =
    (!HasOnGradients<Type> || WatchesGradients<Type, Model>) && (!HasOnStep<Type> || WatchesSteps<Type>) &&
    (!HasOnSkip<Type> || WatchesSkips<Type>) && (!HasOnEpoch<Type> || WatchesEpochs<Type>) &&
    (!HasOnPhase<Type> || WatchesPhases<Type>) &&
    (!plays<Role::observer, Type> || ((!HasStop<Type> || AsksToStop<Type>) && (!HasDue<Type> || SaysWhenDue<Type>)));

template <class Type, class Model>
constexpr bool watches = WatchesGradients<Type, Model> || WatchesSteps<Type> || WatchesSkips<Type> ||
                         WatchesEpochs<Type> || WatchesPhases<Type> || AsksToStop<Type> || HasOnGradients<Type> ||
                         HasOnStep<Type> || HasOnSkip<Type> || HasOnEpoch<Type> || HasOnPhase<Type> || HasStop<Type>;

// State that would be left out of a checkpoint: save or load of another shape, or one without the other.
template <class Type>
constexpr bool state_fits = Stateful<Type> || plays<Role::checkpointing, Type> || (!HasSave<Type> && !HasLoad<Type>);

template <class Type>
constexpr bool readings_fit =
    !HasReadings<Type> || requires(const Type& policy, Readings& out) { policy.readings(out); };

}  // namespace frugal::inline v0::detail
