#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace frugal::inline v0::detail {

struct NoGroup {
  std::vector<at::Tensor> params() const { return {}; }
};

// The groups of an optimizer, each with params().
decltype(auto) groups_of(auto& optimizer) {
  constexpr bool shown = requires { optimizer.param_groups(); };
  static_assert(shown,
                "frugal: this optimizer does not show its parameters. Give it param_groups(), a range of groups "
                "that have params().");
  if constexpr (shown) return optimizer.param_groups();
  else return std::vector<NoGroup>();  // the assertion has spoken, and no second error may follow it
}

// What tells optimizers apart, also when a wrapper hands one on: the first parameter, which no two share.
const void* identity_of(auto& optimizer) {
  for (auto&& group : groups_of(optimizer))
    for (const at::Tensor& parameter : group.params())
      if (parameter.defined()) return parameter.unsafeGetTensorImpl();
  return nullptr;
}

}  // namespace frugal::inline v0::detail
