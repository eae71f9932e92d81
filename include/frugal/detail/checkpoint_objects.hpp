#pragma once

#include <frugal/detail/checkpoint_arguments.hpp>
#include <frugal/detail/state_archive.hpp>

#include <c10/util/Exception.h>

#include <cstddef>
#include <set>
#include <string>

// The objects with save(out) and load(in) in a State: policies, the Trainer's memory, whatever a user hands over.
namespace frugal::inline v0::detail {

// The section itself is a value too: an object that saved nothing was saved all the same.
template <class Object>
void save_object(State& state, const std::string& section, const Object& object) {
  state.add(section, "section");
  StateOut out(state, section);
  object.save(out);
}

// Loads the objects in their order. When one throws, those that were loaded, and the one that was half-way, get back what
// they had. Objects that the checkpoint does not know stay as they are, with one warning for all of them.
template <class... Arguments>
void load_objects(const State& saved, Arguments&... arguments) {
  const auto each_object = [&](auto&& call) {
    const auto nothing = [](const std::string&, auto&) {};
    each_section(nothing, nothing, call, arguments...);
  };
  State before;
  each_object([&](const std::string& section, const auto& object) { save_object(before, section, object); });
  for (auto& [name, tensor] : before.tensors) tensor = tensor.clone();  // load() may write into the live ones

  std::set<std::string> touched;
  std::string unknown;
  try {
    each_object([&](const std::string& section, auto& object) {
      if (!saved.has(section)) return static_cast<void>(unknown += " '" + section + "'");
      touched.insert(section);
      StateIn in(saved, section);
      object.load(in);
    });
  } catch (...) {
    each_object([&](const std::string& section, auto& object) {
      if (!touched.contains(section)) return;
      try {
        StateIn in(before, section);
        object.load(in);
      } catch (...) {  // the first error is the one that explains
      }
    });
    throw;
  }
  if (!unknown.empty())
    TORCH_WARN("CheckpointManager: the checkpoint does not know", unknown,
               "; what has no saved state stays as constructed.");
  std::string left_over;
  for (const auto& [name, value] : saved.values)
    if (value == "section" && !before.has(name)) left_over += " '" + name + "'";
  if (!left_over.empty())
    TORCH_WARN("CheckpointManager: nobody takes the state of", left_over,
               " in the checkpoint. Pass to restore() what was "
               "passed to save().");
}

}  // namespace frugal::inline v0::detail
