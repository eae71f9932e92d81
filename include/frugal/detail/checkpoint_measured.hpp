#pragma once

#include <frugal/detail/checkpoint_arguments.hpp>
#include <frugal/detail/checkpoint_directory.hpp>
#include <frugal/detail/state_archive.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <type_traits>

// Which weights the metric in a checkpoint was measured on, where they are not the ones in the model: a moving average, or
// the last weights while the model holds the best ones. "measured/model/fc.weight" = "state/averaging/average.fc.weight".
namespace frugal::inline v0::detail {

// Has such weights in its section. measured(module, out) calls out(parameter, name of its value in the section).
template <class Object, class Module>
concept HoldsMeasured = requires(const Object& object, const Module& module) {
  object.measured(module, [](const std::string&, const std::string&) {});
};

// Forward passes since the check, as a Trainer counts them.
bool forward_since_check(const auto& object) {
  if constexpr (requires {
                  { object.forward_since_check() } -> std::same_as<bool>;
                })
    return object.forward_since_check();
  else return false;
}

// Notes those of the first model, which restore_best() is for. Of several objects the last one counts.
template <class Model, class... Arguments>
void note_measured(State& state, Model& model, Arguments&... arguments) {
  const auto nothing = [](const std::string&, auto&) {};
  const auto note = [&]<class Object>(const std::string& section, const Object& object) {
    if constexpr (ModuleLike<Model>) {
      const auto& module = module_of(model);
      if constexpr (HoldsMeasured<Object, std::remove_cvref_t<decltype(module)>>)
        object.measured(module, [&](const std::string& parameter, const std::string& value) {
          state.values.insert_or_assign("measured/model/" + parameter, section + "/" + value);
        });
    }
  };
  each_section(nothing, nothing, note, model, arguments...);
  if constexpr (ModuleLike<Model>)
    if ((forward_since_check(arguments) || ...) && !module_of(model).named_buffers().is_empty())
      state.add(old_metric_key, "of the buffers before a forward pass");
}

// The tensors that are noted.
inline std::set<std::string, std::less<>> measured_in(const std::map<std::string, std::string>& values) {
  std::set<std::string, std::less<>> names;
  for (auto at = values.lower_bound("measured/"); at != values.end() && at->first.starts_with("measured/"); ++at)
    names.insert(at->second);
  return names;
}

// Puts them in the place of the weights. An average of low-precision weights is rounded, as it was for the measurement.
inline void take_measured(State& saved, const State& live) {
  for (const auto& [name, tensor] : live.tensors) {
    const auto noted = saved.values.find("measured/" + name);
    if (noted == saved.values.end()) continue;
    const auto found = saved.tensors.find(noted->second);
    TORCH_CHECK(found != saved.tensors.end() && found->second.sizes() == tensor.sizes(),
                "CheckpointManager: the metric of the checkpoint belongs to '", noted->second,
                "', which does not fit the model. Use restore(). Nothing was changed.");
    saved.tensors[name] = found->second.to(tensor.scalar_type());
  }
}

}  // namespace frugal::inline v0::detail
