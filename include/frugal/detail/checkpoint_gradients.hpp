#pragma once

#include <frugal/detail/parameter_names.hpp>
#include <frugal/detail/state_archive.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

// The gradients of an unfinished window: "gradient/<parameter>", of a sparse one "gradient/<parameter>/indices" and
// "/values".
namespace frugal::inline v0::detail {

inline void save_gradients(State& state, const ParameterNames& names) {
  for (const auto& [parameter, tensor, in_module] : names.all()) {
    const at::Tensor& gradient = tensor.grad();
    const std::string name = "gradient/" + parameter;
    if (!gradient.defined()) continue;
    if (gradient.layout() != at::kSparse) {
      state.add(name, gradient);
      continue;
    }
    state.add(name + "/indices", gradient._indices());
    state.add(name + "/values", gradient._values());
    state.add(name + "/coalesced", gradient.is_coalesced() ? "yes" : "no");
  }
}

inline at::Tensor gradient_in(const State& saved, const std::string& name, const at::Tensor& parameter) {
  const c10::NoGradGuard no_grad;
  const auto check = [&](bool fits) {
    TORCH_CHECK(fits, "CheckpointManager: '", name, "' of the checkpoint does not fit its parameter (",
                parameter.scalar_type(), " ", parameter.sizes(), "). Resume with the model that wrote it.");
  };
  if (const auto found = saved.tensors.find(name); found != saved.tensors.end()) {
    check(found->second.sizes() == parameter.sizes() && found->second.scalar_type() == parameter.scalar_type());
    return at::empty_like(parameter.detach()).copy_(found->second);
  }
  const auto coalesced = saved.values.find(name + "/coalesced");
  if (coalesced == saved.values.end()) return {};
  check(saved.has(name + "/indices") && saved.has(name + "/values"));
  return at::_sparse_coo_tensor_unsafe(saved.tensors.at(name + "/indices").to(parameter.device()),
                                       saved.tensors.at(name + "/values").to(parameter.device()), parameter.sizes(),
                                       at::TensorOptions(parameter.scalar_type()).device(parameter.device()),
                                       coalesced->second == "yes");
}

// Checks everything and changes nothing; what it returns sets every gradient. None where the checkpoint has none: a window
// starts without gradients.
inline std::function<void()> prepare_gradients(const State& saved, const ParameterNames& names) {
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients;
  for (const auto& [parameter, tensor, in_module] : names.all())
    gradients.emplace_back(tensor, gradient_in(saved, "gradient/" + parameter, tensor));
  return [gradients = std::move(gradients)]() mutable {
    for (auto& [parameter, gradient] : gradients)
      if (parameter.is_leaf() && (gradient.defined() || parameter.grad().defined()))
        parameter.mutable_grad() = gradient;
  };
}

}  // namespace frugal::inline v0::detail
