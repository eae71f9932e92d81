#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

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

// What tells optimizers apart, also when a wrapper hands one on: the first parameter, which no two share. While an identity
// is kept, no other tensor gets that address, and it can be told that the parameter is gone. Null: there is none.
class Identity {
 public:
  explicit Identity(const at::Tensor& parameter) : parameter_(parameter.getIntrusivePtr()) {}

  bool is(const at::Tensor& parameter) const { return is(parameter.unsafeGetTensorImpl()); }
  bool is_gone() const { return parameter_.expired(); }
  friend bool operator==(const Identity& one, const Identity& other) {
    return one.is(other.parameter_._unsafe_get_target());
  }

 private:
  bool is(const c10::TensorImpl* parameter) const { return parameter_._unsafe_get_target() == parameter; }

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> parameter_;
};

Identity identity_of(auto& optimizer) {
  for (auto&& group : groups_of(optimizer))
    for (const at::Tensor& parameter : group.params())
      if (parameter.defined()) return Identity(parameter);
  return Identity(at::Tensor());
}

}  // namespace frugal::inline v0::detail
