#pragma once

#include <frugal/detail/checkpoint_arguments.hpp>

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// The name of every parameter that is saved: the one that its module gives it, "model/fc.weight". A parameter of an
// optimizer that is in no module goes by its place: "optimizer.group.0.3".
class ParameterNames {
 public:
  struct Named {
    std::string name;
    at::Tensor tensor;
    bool in_module;
  };

  template <class... Arguments>
  explicit ParameterNames(Arguments&... arguments) {
    const auto nothing = [](const std::string&, auto&) {};
    each_section(
        [&](const std::string& section, auto& module) {
          for (auto& item : module.named_parameters()) add(section + "/" + item.key(), item.value(), true);
        },
        nothing, nothing, arguments...);
    each_section(
        nothing,
        [&](const std::string& section, auto& optimizer) {
          std::size_t g = 0;
          for (const auto& group : optimizer.param_groups()) {
            std::size_t i = 0;
            for (const auto& parameter : group.params())
              add(section + ".group." + std::to_string(g) + "." + std::to_string(i++), parameter, false);
            ++g;
          }
        },
        nothing, arguments...);
  }

  const std::vector<Named>& all() const { return all_; }
  const std::string& of(const at::Tensor& parameter) const {
    return all_[place_.at(parameter.unsafeGetTensorImpl())].name;
  }

 private:
  // A parameter that is shared by two modules goes by the first name.
  void add(std::string name, const at::Tensor& parameter, bool in_module) {
    if (place_.try_emplace(parameter.unsafeGetTensorImpl(), all_.size()).second)
      all_.push_back({std::move(name), parameter, in_module});
  }

  std::vector<Named> all_;
  std::unordered_map<const void*, std::size_t> place_;
};

}  // namespace frugal::inline v0::detail
