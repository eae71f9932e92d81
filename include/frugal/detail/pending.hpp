#pragma once

#include <frugal/detail/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_mul.h>

#include <concepts>
#include <optional>
#include <vector>

namespace frugal::inline v0::detail {

// How large gradients are together: a number when all are in host memory, else a tensor of no dimension on an accelerator.
struct GradientSize {
  double host = 0;
  at::Tensor device = {};

  // One device sync if there is a device.
  double read() const { return device.defined() ? device.item<double>() : host; }
};

// What the gradients of a window must still be multiplied by before the step, and what is known about them as they are.
struct PendingScale {
  double factor = 1;
  at::Tensor coefficient = {};            // and by this: a float of no dimension on an accelerator; undefined: by 1
  std::optional<GradientSize> size = {};  // some norm; not finite if a gradient is not
  at::Tensor skip = {};  // the step must change nothing if this float is 1; undefined: it is known to be due

  bool settled() const { return factor == 1 && !coefficient.defined(); }

  // Multiplies the gradients of `optimizer` now, for whoever cannot take what is pending.
  void settle(auto& optimizer, Gradients& gradients) const {
    if (settled()) return;
    gradients.each_kind(optimizer, [&](std::vector<at::Tensor>& list) { multiply(list); });
  }
  // One device sync if there is something to ask.
  bool skips() const { return skip.defined() && skip.item<float>() != 0; }
  // `list` is of one kind.
  void multiply(at::TensorList list) const {
    if (factor != 1) at::_foreach_mul_(list, factor);
    if (coefficient.defined()) at::_foreach_mul_(list, coefficient.to(list[0].device(), /*non_blocking=*/true));
  }
};

// An optimizer whose step applies what is pending.
template <class Optimizer>
concept Deferring = requires(Optimizer& optimizer) {
  { optimizer.pending } -> std::same_as<PendingScale&>;
};

// One that takes back what it counted in a step that PendingScale::skip turned into none.
template <class Optimizer>
concept Revocable = Optimizer::revocable;

}  // namespace frugal::inline v0::detail
