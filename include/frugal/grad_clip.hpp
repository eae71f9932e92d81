#pragma once

#include <frugal/detail/gradient_norm.hpp>
#include <frugal/detail/gradients.hpp>
#include <frugal/detail/pending.hpp>
#include <frugal/policy.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

/// Gradient clipping, by the joint norm or by value, that never waits for a device.
///
///     frugal::GradClip clip(1.0);                              // joint 2-norm of all gradients at most 1
///     frugal::GradClip limit = frugal::GradClip::by_value(0.5);
///     loss.backward(); clip.clip(optimizer); optimizer.step();
///
/// By norm it multiplies all gradients by max_norm / (norm + 1e-6) when that is below 1, as
/// torch::nn::utils::clip_grad_norm_ does (Pascanu et al., "On the difficulty of training recurrent neural networks",
/// 2013), with two differences: that function ends with a device-to-host copy, and one inf makes it turn every gradient
/// into NaN or 0. Here a window with any inf or NaN is left exactly as it is, in both modes, for the loss scaler or you
/// to see.
///
/// Gradients may be on several devices, of several dtypes, sparse (their values count) and missing. On a CPU the norm of
/// float and double gradients is right whenever it is a double; norms of float16 and bfloat16 gradients and all norms on an
/// accelerator are taken in float32, where one beyond its range counts as not finite. Call it with unscaled gradients:
/// after AmpPolicy::unscale. `infinity` switches it off: no pass, no allocation.
///
/// Costs, by norm: one reading pass, and one writing pass that a CPU leaves out when nothing has to be clipped. By
/// value: the same two passes; on an accelerator the second is one kernel per tensor. With FusedStep, in update() or in a
/// Trainer without a policy that watches gradients, clipping by norm never writes: the step multiplies. On a CPU the reading
/// pass over float and double gradients calls no operator and allocates nothing. Nothing is read back from a device, unless
/// gradients are on an accelerator and on the CPU at once. Device code not yet run on a GPU.
namespace frugal::inline v0 {

namespace detail {

// What the gradients are multiplied by, computed where the norm is; 1 when it is not finite.
inline at::Tensor clip_coefficient(const at::Tensor& norm, double max_norm) {
  return at::where(at::isfinite(norm), norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0), 1.0);
}

// Clamps into [-limit, limit] unless `largest`, the largest magnitude of all gradients, is not finite.
inline void clamp_if_finite(std::vector<at::Tensor>& gradients, const at::Tensor& largest, double limit) {
  const at::Tensor bound = at::where(at::isfinite(largest), at::scalar_tensor(limit, largest.options()),
                                     std::numeric_limits<double>::infinity())
                               .to(gradients[0].options());
  const at::Tensor lower = bound.neg();
  for (at::Tensor& gradient : gradients) gradient.clamp_(lower, bound);
}

}  // namespace detail

/// Clips gradients; see the top of this header. Movable, without state that a checkpoint needs.
class GradClip {
 public:
  static constexpr Role role = Role::clipping;
  using Defers = GradClip;  // detail/slots.hpp

  /// By the joint 2-norm of all gradients. Positive; infinity: off.
  explicit GradClip(double max_norm) : GradClip(By::norm, max_norm) {}
  /// Every element into [-limit, limit]. Positive; infinity: off.
  static GradClip by_value(double limit) { return GradClip(By::value, limit); }

  /// Clips the gradients of `optimizer`, anything with param_groups(), in place. Once per window, before the step.
  void clip(auto& optimizer);

  /// The joint norm before the last clip(), one device sync if gradients are on a device. NaN before the first clip(), by
  /// value, and when switched off; 0 when there was no gradient; inf or NaN for a window that overflowed.
  double norm() const { return norm_ ? norm_->read() : std::numeric_limits<double>::quiet_NaN(); }
  /// `norm`: read when somebody looks.
  void readings(auto& out) const {
    if (norm_) out.write("norm", norm());
  }

 private:
  enum class By { norm, value };

  GradClip(By by, double bound) : by_(by), bound_(bound) {
    TORCH_CHECK(bound > 0, "GradClip: ", by == By::norm ? "max_norm" : "limit", " is ", bound,
                ". It must be positive; infinity switches clipping off.");
  }

  void clip_norm(auto& optimizer);
  void clip_values(auto& optimizer);
  detail::GradientSize measure(auto& optimizer, detail::Norm norm);
  // What the gradients are still to be multiplied by.
  static double pending_factor(auto& optimizer) {
    if constexpr (detail::Deferring<std::remove_reference_t<decltype(optimizer)>>)
      return std::abs(optimizer.pending.factor);
    else return 1.0;
  }

  By by_;
  double bound_;
  std::optional<detail::GradientSize> norm_;
  detail::Gradients gradients_;
  detail::GradientNorm measured_;
};

void GradClip::clip(auto& optimizer) {
  if (std::isinf(bound_)) return;
  const c10::NoGradGuard off;
  by_ == By::norm ? clip_norm(optimizer) : clip_values(optimizer);
}

// One reading pass. A precision policy that looks for overflow later finds what it saw.
detail::GradientSize GradClip::measure(auto& optimizer, detail::Norm norm) {
  detail::GradientSize size = measured_.of(optimizer, gradients_, norm);
  if constexpr (requires { optimizer.pending.size; }) optimizer.pending.size = size;
  return size;
}

void GradClip::clip_norm(auto& optimizer) {
  constexpr bool later = detail::Deferring<std::remove_reference_t<decltype(optimizer)>>;
  detail::GradientSize norm = measure(optimizer, detail::Norm::two);
  const double factor = pending_factor(optimizer);
  if (!norm.device.defined()) {
    norm.host *= factor;
    norm_ = norm;
    const double coefficient = bound_ / (norm.host + 1e-6);
    if (!(coefficient > 0.0 && coefficient < 1.0)) return;  // short enough, inf or NaN
    if constexpr (later) optimizer.pending.factor *= coefficient;
    else detail::PendingScale{.factor = coefficient}.settle(optimizer, gradients_);
  } else {
    if (factor != 1.0) norm.device = norm.device.mul(factor);
    norm_ = norm;
    const at::Tensor coefficient = detail::clip_coefficient(norm.device, bound_);
    if constexpr (later) optimizer.pending.coefficient = coefficient;
    else detail::PendingScale{.coefficient = coefficient}.settle(optimizer, gradients_);
  }
}

void GradClip::clip_values(auto& optimizer) {
  const detail::GradientSize largest = measure(optimizer, detail::Norm::largest);
  const double limit = bound_ / pending_factor(optimizer);  // of the gradients as they are
  if (largest.device.defined()) {
    gradients_.each_kind(optimizer,
                         [&](std::vector<at::Tensor>& list) { detail::clamp_if_finite(list, largest.device, limit); });
  } else if (std::isfinite(largest.host) && largest.host > limit) {
    gradients_.each_kind(optimizer, [&](std::vector<at::Tensor>& list) {
      at::_foreach_clamp_max_(list, limit);
      at::_foreach_clamp_min_(list, -limit);
    });
  }
}

}  // namespace frugal::inline v0
