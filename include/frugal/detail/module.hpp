#pragma once

namespace frugal::inline v0::detail {

// The module behind a model, which may be a Module, a ModuleHolder or a shared_ptr.
auto& module_of(auto& model) {
  if constexpr (requires { model->parameters(); }) return *model;
  else return model;
}

}  // namespace frugal::inline v0::detail
