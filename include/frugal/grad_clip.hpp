#pragma once

#include <frugal/detail/gradients.hpp>
#include <frugal/policy.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/Scalar.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
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
/// Gradients may be on several devices, of several dtypes, sparse (their values count) and missing. Norms of float16
/// and bfloat16 gradients are taken in float32; a joint norm beyond float32's range counts as not finite. Call it with
/// unscaled gradients: after AmpPolicy::unscale. `infinity` switches it off: no pass, no allocation.
///
/// Costs, by norm: one reading pass, and one writing pass that a CPU leaves out when nothing has to be clipped. By
/// value: the same two passes; on an accelerator the second is one kernel per tensor. Nothing is read back from a
/// device, unless gradients are on an accelerator and on the CPU at once. Device code not yet run on a GPU.
namespace frugal::inline v0 {

namespace detail {

// A 0-dim tensor in host memory: a load, neither an operator nor a device read.
inline double host_value(const at::Tensor& scalar) {
  return scalar.scalar_type() == at::kDouble ? *scalar.const_data_ptr<double>()
                                             : static_cast<double>(*scalar.const_data_ptr<float>());
}

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

  /// By the joint 2-norm of all gradients. Positive; infinity: off.
  explicit GradClip(double max_norm) : GradClip(By::norm, max_norm) {}
  /// Every element into [-limit, limit]. Positive; infinity: off.
  static GradClip by_value(double limit) { return GradClip(By::value, limit); }

  /// Clips the gradients of `optimizer`, anything with param_groups(), in place. Once per window, before the step.
  void clip(auto& optimizer);

  /// The joint norm before the last clip(), one device sync. NaN before the first clip(), by value, and when switched
  /// off; 0 when there was no gradient.
  double norm() const { return norm_.defined() ? norm_.item<double>() : std::numeric_limits<double>::quiet_NaN(); }
  /// `norm`: one device sync, when somebody looks.
  void readings(auto& out) const {
    if (norm_.defined()) out.write("norm", norm());
  }

 private:
  enum class By { norm, value };

  GradClip(By by, double bound) : by_(by), bound_(bound) {
    TORCH_CHECK(bound > 0, "GradClip: ", by == By::norm ? "max_norm" : "limit", " is ", bound,
                ". It must be positive; infinity switches clipping off.");
  }

  at::Tensor joint_norm(auto& optimizer, const at::Scalar& order);
  void clip_norm(auto& optimizer);
  void clip_values(auto& optimizer);

  By by_;
  double bound_;
  at::Tensor norm_;
  detail::Gradients gradients_;
  std::vector<at::Tensor> norms_;
};

void GradClip::clip(auto& optimizer) {
  if (std::isinf(bound_)) return;
  const c10::NoGradGuard off;
  by_ == By::norm ? clip_norm(optimizer) : clip_values(optimizer);
}

void GradClip::clip_norm(auto& optimizer) {
  norm_ = joint_norm(optimizer, 2);
  if (!norm_.defined()) {
    norm_ = at::zeros({}, at::kFloat);
  } else if (norm_.is_cpu()) {
    const double coefficient = bound_ / (detail::host_value(norm_) + 1e-6);
    if (!(coefficient > 0.0 && coefficient < 1.0)) return;  // short enough, inf or NaN
    gradients_.each_kind(optimizer, [&](std::vector<at::Tensor>& list) { at::_foreach_mul_(list, coefficient); });
  } else {
    const at::Tensor coefficient = detail::clip_coefficient(norm_, bound_);
    gradients_.each_kind(optimizer, [&](std::vector<at::Tensor>& list) {
      at::_foreach_mul_(list, coefficient.to(list[0].device(), /*non_blocking=*/true));
    });
  }
}

void GradClip::clip_values(auto& optimizer) {
  const at::Tensor largest = joint_norm(optimizer, std::numeric_limits<double>::infinity());
  if (!largest.defined()) return;
  if (largest.is_cpu()) {
    const double value = detail::host_value(largest);
    if (!std::isfinite(value) || value <= bound_) return;
    gradients_.each_kind(optimizer, [&](std::vector<at::Tensor>& list) {
      at::_foreach_clamp_max_(list, bound_);
      at::_foreach_clamp_min_(list, -bound_);
    });
  } else {
    gradients_.each_kind(optimizer,
                         [&](std::vector<at::Tensor>& list) { detail::clamp_if_finite(list, largest, bound_); });
  }
}

// The norm of all gradients as a 0-dim tensor, on an accelerator if there is one; undefined without gradients.
at::Tensor GradClip::joint_norm(auto& optimizer, const at::Scalar& order) {
  norms_.clear();
  gradients_.each_kind(optimizer, [&](std::vector<at::Tensor>& list) {
    const at::ScalarType dtype = list[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    norms_.push_back(at::linalg_vector_norm(at::stack(at::_foreach_norm(list, order, dtype)), order));
  });
  if (norms_.empty()) return {};
  if (norms_.size() == 1) return std::move(norms_.front());
  const auto accelerated = std::ranges::find_if(norms_, [](const at::Tensor& norm) { return !norm.is_cpu(); });
  const at::Device home = (accelerated == norms_.end() ? norms_.front() : *accelerated).device();
  for (at::Tensor& norm : norms_) norm = norm.to(home, at::kFloat, /*non_blocking=*/true);
  return at::linalg_vector_norm(at::stack(norms_), order);
}

}  // namespace frugal::inline v0
