#pragma once

#include <frugal/detail/checkpoint_arguments.hpp>
#include <frugal/detail/checkpoint_directory.hpp>
#include <frugal/detail/checkpoint_gradients.hpp>
#include <frugal/detail/checkpoint_measured.hpp>
#include <frugal/detail/checkpoint_objects.hpp>
#include <frugal/detail/checkpoint_optimizer.hpp>
#include <frugal/detail/checkpoint_overlap.hpp>
#include <frugal/detail/open_answers.hpp>
#include <frugal/detail/parameter_names.hpp>
#include <frugal/detail/random_state.hpp>
#include <frugal/detail/state_archive.hpp>
#include <frugal/detail/writable.hpp>
#include <frugal/policy.hpp>
#include <frugal/version.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

// What is in a checkpoint, and how it gets there and back. The names are documented at CheckpointManager.
namespace frugal::inline v0::detail {

inline constexpr std::int64_t checkpoint_format = 1;

// An optimizer of a user's own, with save(out) and load(in).
template <class Optimizer>
concept SavesItself = Stateful<std::remove_const_t<Optimizer>>;

// Parameters and buffers, and the parameters that are in no module but in an optimizer.
template <class... Arguments>
void save_weights(State& state, const ParameterNames& names, Arguments&... arguments) {
  const auto nothing = [](const std::string&, auto&) {};
  each_section(
      [&](const std::string& section, auto& module) {
        for (auto& item : module.named_parameters()) state.add(section + "/" + item.key(), item.value());
        for (auto& item : module.named_buffers()) state.add(section + "/" + item.key(), item.value());
      },
      nothing, nothing, arguments...);
  for (const auto& [name, tensor, in_module] : names.all())
    if (!in_module) state.add("parameter/" + name, tensor);
}

// Everything, as it is now: nothing is copied yet.
template <class... Arguments>
State collect(const Progress& progress, Arguments&... arguments) {
  State state;
  const ParameterNames names(arguments...);
  save_weights(state, names, arguments...);
  each_section([](const std::string&, auto&) {},
               [&]<class Optimizer>(const std::string& section, Optimizer& optimizer) {
                 expect_answered("CheckpointManager: save()", optimizer);
                 if constexpr (!SavesItself<Optimizer>) save_optimizer(state, section, optimizer, names);
               },
               [&](const std::string& section, const auto& object) { save_object(state, section, object); },
               arguments...);
  note_measured(state, arguments...);
  if ((is_pending(arguments) || ...)) save_gradients(state, names);
  StateOut random(state, "rng");
  RandomState::now().save(random);
  state.add("frugal.format", text_of(checkpoint_format));
  state.add("frugal.version", std::to_string(FRUGAL_VERSION_MAJOR) + "." + std::to_string(FRUGAL_VERSION_MINOR) + "." +
                                  std::to_string(FRUGAL_VERSION_PATCH));
  state.add("libtorch.version", std::string(TORCH_VERSION));
  write_progress(progress, state.values);
  return state;
}

inline bool is_weight(std::string_view name) {
  const std::string_view section = name.substr(0, name.find('/'));
  return section == "model" || section.starts_with("model.") || section == "parameter";
}

// Throws, naming the first difference, when the weights in `live` are not the ones in the checkpoint or cannot take them.
inline void need_same_weights(const State& saved, const State& live) {
  constexpr std::string_view hint =
      " Resume with the model that wrote it, or in another directory. Nothing was changed.";
  for (const auto& [name, tensor] : live.tensors) {
    const auto found = saved.tensors.find(name);
    TORCH_CHECK(found != saved.tensors.end(), "CheckpointManager: the checkpoint is of another model, it has no '",
                name, "'.", hint);
    const at::Tensor& other = found->second;
    TORCH_CHECK(other.sizes() == tensor.sizes() && other.scalar_type() == tensor.scalar_type(),
                "CheckpointManager: the checkpoint is of another model, '", name, "' is ", other.scalar_type(), " ",
                other.sizes(), " there and ", tensor.scalar_type(), " ", tensor.sizes(), " here.", hint);
    const char* const why = not_writable(tensor, other);
    TORCH_CHECK(!why, "CheckpointManager: '", name, "' cannot be restored, it ", why,
                ". Give it memory of its own (clone()). Nothing was changed.");
  }
  for (const auto& [name, tensor] : saved.tensors)
    TORCH_CHECK(!is_weight(name) || live.has(name), "CheckpointManager: the checkpoint is of another model, it has '",
                name, "', which this one lacks.", hint);
  need_agreement(saved, live);
}

inline void copy_weights(const State& saved, const State& live) {
  const c10::NoGradGuard no_grad;
  for (const auto& [name, tensor] : live.tensors) write_values(tensor, saved.tensors.at(name));
}

inline void need_known_format(const State& saved) {
  std::int64_t format = 0;
  const auto found = saved.values.find("frugal.format");
  TORCH_CHECK(
      found != saved.values.end() && parse(found->second, format) && format == checkpoint_format,
      "CheckpointManager: the checkpoint has a format that this version of frugal does not know. Update frugal.");
}

template <class... Arguments>
void need_all_optimizers(const State& saved, Arguments&... arguments) {
  const auto nothing = [](const std::string&, auto&) {};
  std::set<std::string> passed;
  each_section(nothing, [&](const std::string& section, auto&) { passed.insert(section); }, nothing, arguments...);
  for (const auto& [name, value] : saved.values)
    if (name.starts_with("optimizer") && name.ends_with("/class"))
      TORCH_CHECK(passed.contains(name.substr(0, name.find('/'))), "CheckpointManager: the checkpoint has '",
                  name.substr(0, name.find('/')),
                  "', which was not passed. Pass to restore() what was passed to save().");
}

// Puts everything back, or throws and leaves everything as it was.
template <class... Arguments>
Progress restore_all(const State& saved, Arguments&... arguments) {
  need_known_format(saved);
  const Progress progress = read_progress(saved.values);
  const ParameterNames names(arguments...);
  State live;
  save_weights(live, names, arguments...);
  need_same_weights(saved, live);
  need_all_optimizers(saved, arguments...);

  std::vector<std::function<void()>> apply;
  apply.push_back([&] { copy_weights(saved, live); });
  each_section([](const std::string&, auto&) {},
               [&]<class Optimizer>(const std::string& section, Optimizer& optimizer) {
                 if constexpr (!SavesItself<Optimizer>)
                   apply.push_back(prepare_optimizer(saved, section, optimizer, names));
               },
               [](const std::string&, auto&) {}, arguments...);
  apply.push_back(prepare_gradients(saved, names));
  RandomState random;
  StateIn saved_random(saved, "rng");
  random.load(saved_random);
  random.check();
  apply.push_back([&] { random.restore(); });
  load_objects(saved, arguments...);  // may throw, and takes back what it did
  for (const auto& put : apply) put();
  return progress;
}

// The parameters and buffers of one model that its metric was measured on.
template <class Model>
void restore_measured(State saved, Model& model) {
  need_known_format(saved);
  State live;
  save_weights(live, ParameterNames(model), model);
  need_same_weights(saved, live);
  take_measured(saved, live);
  need_same_weights(saved, live);
  copy_weights(saved, live);
}

}  // namespace frugal::inline v0::detail
