#pragma once

#include <frugal/detail/optimizer_state.hpp>
#include <frugal/detail/parameter_names.hpp>
#include <frugal/detail/state_archive.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// An optimizer in a State. In its section: "class", "groups", "group.0/parameters" (how many), "group.0/lr" and the other
// options, and by the name of every parameter "<parameter>/group" and its state, "<parameter>/exp_avg".
namespace frugal::inline v0::detail {

inline void save_optimizer(State& state, const std::string& section, const torch::optim::Optimizer& optimizer,
                           const ParameterNames& names) {
  StateOut out(state, section);
  with_class_of(optimizer, [&](auto kind) {
    const auto& groups = optimizer.param_groups();
    std::set<const void*> seen;  // a tied parameter may be listed twice
    out.write("class", kind.name);
    out.write("groups", static_cast<std::int64_t>(groups.size()));
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const std::string group = "group." + std::to_string(g) + "/";
      out.write(group + "parameters", static_cast<std::int64_t>(groups[g].params().size()));
      each_option(kind.options(groups[g]), [&](const char* name, const auto& value) {
        if constexpr (std::is_same_v<decltype(value), const bool&>) out.write(group + name, std::int64_t{value});
        else out.write(group + name, value);
      });
      for (const at::Tensor& parameter : groups[g].params()) {
        if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
        const std::string prefix = names.of(parameter) + "/";
        out.write(prefix + "group", static_cast<std::int64_t>(g));
        const auto* values = kind.state(optimizer, parameter);
        if (!values) continue;
        each_value(*values, [&](const char* name, const auto& value) { out.write(prefix + name, value); });
      }
    }
  });
}

// Compares an optimizer with its section in a checkpoint and builds what it will hold.
template <class Class>
class OptimizerRestoration {
 public:
  using Options = typename Class::Options;
  using Values = typename Class::State;

  OptimizerRestoration(const State& state, const std::string& section, torch::optim::Optimizer& optimizer,
                       const ParameterNames& names, Class kind)
      : optimizer_(optimizer), state_(state), section_(section), in_(state, section), kind_(kind) {
    const auto groups = static_cast<std::int64_t>(optimizer.param_groups().size());
    const auto saved_class = take<std::string>("class");
    TORCH_CHECK(saved_class == kind.name, "CheckpointManager: '", section, "' is ", saved_class,
                " in the checkpoint and ", kind.name, " here. Resume with the optimizer that wrote it.");
    const auto saved_groups = take<std::int64_t>("groups");
    TORCH_CHECK(saved_groups == groups, "CheckpointManager: '", section, "' has ", saved_groups,
                " parameter groups in the checkpoint and ", groups,
                " here. Build the groups as in the run that wrote it.");
    for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) read_group(g, names);
    check_all_taken();
  }

  // Cannot fail half-way: everything is built. In place: others may hold references to options and state.
  void apply() {
    std::set<const void*> stateful;
    for (auto& [parameter, values] : values_) {
      auto& held = optimizer_.state()[parameter];
      if (auto* same = dynamic_cast<Values*>(held.get())) *same = std::move(*values);
      else held = std::move(values);
      stateful.insert(parameter);
    }
    std::vector<void*> gone;
    for (const auto& [parameter, values] : optimizer_.state())
      if (!stateful.contains(parameter)) gone.push_back(parameter);
    for (void* parameter : gone) optimizer_.state().erase(parameter);
    for (std::size_t g = 0; g < options_.size(); ++g) kind_.options(optimizer_.param_groups()[g]) = options_[g];
  }

 private:
  void read_group(std::size_t g, const ParameterNames& names) {
    auto& group = optimizer_.param_groups()[g];
    const std::string prefix = "group." + std::to_string(g) + "/";
    const auto saved_count = take<std::int64_t>(prefix + "parameters");
    const auto count = static_cast<std::int64_t>(group.params().size());
    TORCH_CHECK(saved_count == count, "CheckpointManager: '", section_, "' has ", saved_count, " parameters in group ",
                g, " of the checkpoint and ", count, " here. Build the groups as in the run that wrote it.");
    Options options = kind_.options(group);
    each_option(options, [&](const char* name, auto& value) {
      if constexpr (std::is_same_v<decltype(value), bool&>) value = take<std::int64_t>(prefix + name) != 0;
      else value = take<double>(prefix + name);
    });
    options_.push_back(options);
    for (const at::Tensor& parameter : group.params())
      if (seen_.insert(parameter.unsafeGetTensorImpl()).second) read_parameter(g, names.of(parameter), parameter);
  }

  void read_parameter(std::size_t g, const std::string& name, const at::Tensor& parameter) {
    TORCH_CHECK(in_.has(name + "/group") && take<std::int64_t>(name + "/group") == static_cast<std::int64_t>(g),
                "CheckpointManager: '", name, "' is not in group ", g, " of '", section_,
                "' in the checkpoint. Build the groups as in the run that wrote it.");
    auto values = std::make_unique<Values>();
    bool any = false;
    each_value(*values, [&](const char* field, auto& value) {
      const std::string key = name + "/" + field;
      if (!in_.has(key)) return;
      any = true;
      if constexpr (std::is_same_v<decltype(value), std::int64_t&>) value = take<std::int64_t>(key);
      else value = like(parameter, take<at::Tensor>(key), key);
    });
    if (any) values_.emplace_back(parameter.unsafeGetTensorImpl(), std::move(values));
  }

  // On the parameter's device and with its strides, which the kernels expect, but in the type that it was saved in: a model
  // that changed its type (to(kDouble)) leaves the state in the old one, and LibTorch's optimizers go on with it.
  static at::Tensor like(const at::Tensor& parameter, const at::Tensor& saved, const std::string& key) {
    if (!saved.defined()) return {};
    const auto kind = [](const at::Tensor& tensor) {
      return std::pair(tensor.is_floating_point(), tensor.is_complex());
    };
    TORCH_CHECK(saved.sizes() == parameter.sizes() && kind(saved) == kind(parameter), "CheckpointManager: '", key,
                "' is ", saved.scalar_type(), " ", saved.sizes(), " in the checkpoint, its parameter is ",
                parameter.scalar_type(), " ", parameter.sizes(), ". Resume with the model that wrote it.");
    const c10::NoGradGuard no_grad;
    return at::empty_like(parameter.detach(), at::TensorOptions(saved.scalar_type())).copy_(saved);
  }

  template <class Value>
  Value take(const std::string& name) {
    Value value{};
    in_.read(name, value);
    taken_.insert(section_ + "/" + name);
    return value;
  }
  // What nobody takes would be lost.
  void check_all_taken() const {
    const auto check = [&](const auto& named) {
      for (auto at = named.lower_bound(section_ + "/"); at != named.end() && at->first.starts_with(section_ + "/");
           ++at)
        TORCH_CHECK(taken_.contains(at->first), "CheckpointManager: the optimizer has no place for '", at->first,
                    "' of the checkpoint. Resume with the optimizer that wrote it.");
    };
    check(state_.values);
    check(state_.tensors);
  }

  torch::optim::Optimizer& optimizer_;
  const State& state_;
  const std::string section_;
  StateIn in_;
  Class kind_;
  std::set<std::string> taken_;
  std::set<const void*> seen_;  // a tied parameter may be listed twice
  std::vector<Options> options_;
  std::vector<std::pair<void*, std::unique_ptr<Values>>> values_;
};

// Checks everything and changes nothing; what it returns puts the state in place.
inline std::function<void()> prepare_optimizer(const State& state, const std::string& section,
                                               torch::optim::Optimizer& optimizer, const ParameterNames& names) {
  return with_class_of(optimizer, [&](auto kind) -> std::function<void()> {
    const auto restoration =
        std::make_shared<OptimizerRestoration<decltype(kind)>>(state, section, optimizer, names, kind);
    return [restoration] { restoration->apply(); };
  });
}

}  // namespace frugal::inline v0::detail
