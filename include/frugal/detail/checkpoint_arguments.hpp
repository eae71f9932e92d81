#pragma once

#include <frugal/detail/module.hpp>
#include <frugal/policy.hpp>

#include <concepts>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>

// What may be handed to save() and restore() of a CheckpointManager, and under which name it is saved.
namespace frugal::inline v0::detail {

// A Module, a ModuleHolder or a shared_ptr.
template <class Type>
concept ModuleLike = requires(Type& argument) {
  module_of(argument).named_parameters();
  module_of(argument).named_buffers();
};

// The optimizer behind a reference or a smart pointer.
auto& optimizer_of(auto& argument) {
  if constexpr (requires { argument->param_groups(); }) return *argument;
  else return argument;
}
template <class Type>
concept OptimizerLike = requires(Type& argument) {
  optimizer_of(argument).param_groups();
  optimizer_of(argument).state();
  optimizer_of(argument).defaults();
};

template <class Type>
constexpr bool has_state = ModuleLike<Type> || OptimizerLike<Type> || Stateful<std::remove_const_t<Type>>;

// Says so, in one sentence, where an argument would be left out of the checkpoint.
template <class... Arguments>
constexpr bool all_have_state() {
  constexpr bool all = (has_state<Arguments> && ...);
  static_assert(
      all,
      "CheckpointManager: an argument has no state that can be saved. Pass a module, an optimizer, or a class "
      "with `void save(auto& out) const` and `void load(auto& in)`.");
  return all;
}

// Gradients of an unfinished window exist.
bool is_pending(const auto& argument) {
  if constexpr (requires {
                  { argument.pending() } -> std::same_as<bool>;
                })
    return argument.pending();
  else return false;
}

constexpr std::string_view role_name(Role role) {
  switch (role) {
    case Role::precision:
      return "precision";
    case Role::accumulation:
      return "accumulation";
    case Role::clipping:
      return "clipping";
    case Role::update:
      return "update";
    case Role::schedule:
      return "schedule";
    case Role::averaging:
      return "averaging";
    case Role::stopping:
      return "stopping";
    case Role::checkpointing:
      return "checkpointing";
    case Role::interruption:
      return "interruption";
    case Role::observer:
      return "observer";
    case Role::before_training:
      return "before_training";
  }
  return "policy";
}

// The name of a class's section.
template <class Type>
constexpr std::string_view section_of() {
  if constexpr (requires {
                  { Type::state_name } -> std::convertible_to<std::string_view>;
                })
    return Type::state_name;
  else if constexpr (Policy<Type>) return role_name(Type::role);
  else return "object";
}

// Hands out the names of sections in the order of the arguments: "model", "model.1", "model.2" ...
class Sections {
 public:
  std::string next(std::string_view name) {
    const int repeats = seen_[std::string(name)]++;
    return repeats == 0 ? std::string(name) : std::string(name) + "." + std::to_string(repeats);
  }

 private:
  std::map<std::string, int> seen_;
};

// What is saved of an argument: what it points to, where it is a holder or a smart pointer.
auto& target_of(auto& argument) {
  if constexpr (ModuleLike<decltype(argument)>) return module_of(argument);
  else if constexpr (OptimizerLike<decltype(argument)>) return optimizer_of(argument);
  else return argument;
}

// Calls module(section, target), optimizer(section, target) and object(section, target) for the arguments, in order. One
// argument may be two of them.
template <class... Arguments>
void each_section(auto&& module, auto&& optimizer, auto&& object, Arguments&... arguments) {
  Sections sections;
  const auto visit = [&]<class Target>(Target& target) {
    using Plain = std::remove_const_t<Target>;
    if constexpr (ModuleLike<Target>) module(sections.next("model"), target);
    if constexpr (OptimizerLike<Target>) optimizer(sections.next("optimizer"), target);
    if constexpr (Stateful<Plain>) object(sections.next("state/" + std::string(section_of<Plain>())), target);
  };
  (visit(target_of(arguments)), ...);
}

}  // namespace frugal::inline v0::detail
