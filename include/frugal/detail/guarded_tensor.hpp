#pragma once

#include <frugal/detail/writable.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>
#include <c10/core/Layout.h>

#include <cstring>
#include <utility>

namespace frugal::inline v0::detail {

// Everything about one tensor that a run can change: values (copied to host memory, so that nothing is taken from the
// memory of a device), the memory that they lie in, the gradient, requires_grad.
class GuardedTensor {
 public:
  explicit GuardedTensor(at::Tensor live)
      : live_(std::move(live)),
        memory_(live_.layout() == at::kStrided ? without_repetitions(live_.detach(), live_) : live_),
        place_(live_.detach()),
        requires_grad_(live_.requires_grad()) {
    values_ = memory_.detach().to(c10::DeviceType::CPU, memory_.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }

  const at::Tensor& live() const { return live_; }

  // What runs from now on starts without gradient. The gradient itself is out of its reach.
  void set_gradient_aside() noexcept {
    if (live_.is_leaf() && live_.grad().defined()) gradient_ = std::exchange(live_.mutable_grad(), at::Tensor());
  }
  // Bit for bit. `hand_over` puts a gradient in place: the one that was set aside, or a copy.
  void restore(auto&& hand_over) {
    const c10::NoGradGuard no_grad;
    if (!in_place()) live_.set_data(place_);
    const bool plain = memory_.is_cpu() && memory_.layout() == at::kStrided && memory_.is_contiguous() &&
                       values_.is_contiguous() && memory_.nbytes() > 0;
    // memcpy: a tensor copy goes through the thread pool, which collapses when the cores are busy
    if (plain) std::memcpy(memory_.mutable_data_ptr(), values_.const_data_ptr(), values_.nbytes());
    else write_values(memory_, values_);
    if (!live_.is_leaf()) return;
    if (live_.requires_grad() != requires_grad_) live_.set_requires_grad(requires_grad_);
    if (gradient_.defined()) live_.mutable_grad() = hand_over(std::as_const(gradient_));
    else if (live_.grad().defined()) live_.mutable_grad().reset();
  }

 private:
  // The run did not give the tensor other memory, as set_data() and Module::to() do.
  bool in_place() const {
    if (live_.layout() != at::kStrided || place_.layout() != at::kStrided) return true;
    return live_.is_alias_of(place_) && live_.scalar_type() == place_.scalar_type() &&
           live_.sizes() == place_.sizes() && live_.strides() == place_.strides() &&
           live_.storage_offset() == place_.storage_offset();
  }

  at::Tensor live_;
  at::Tensor memory_, place_;  // where the values go back to; how the tensor lay there
  at::Tensor values_, gradient_;
  bool requires_grad_;
};

}  // namespace frugal::inline v0::detail
