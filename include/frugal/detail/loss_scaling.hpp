#pragma once

#include <frugal/detail/gradient_norm.hpp>
#include <frugal/detail/gradients.hpp>
#include <frugal/detail/pending.hpp>
#include <frugal/loss_scaler.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// What tells optimizers apart, also when a wrapper hands one on: the first parameter, which no two share.
const void* identity_of(auto& optimizer) {
  for (auto&& group : groups_of(optimizer))
    for (const at::Tensor& parameter : group.params())
      if (parameter.defined()) return parameter.unsafeGetTensorImpl();
  return nullptr;
}

// One optimizer's unfinished window: the pass over its gradients and what that found. Kept between steps with its
// scratch tensors, one pair per device.
class UnscaledWindow {
 public:
  explicit UnscaledWindow(const void* optimizer) : optimizer_(optimizer) {}

  bool belongs_to(const void* optimizer) const { return optimizer_ == optimizer; }
  bool open() const { return open_; }
  void open_for_step() { open_ = true; }
  void abandon() { open_ = false; }

  // Multiplies the gradients by `factor` and notes what is not finite: one kernel per (device, dtype), nothing read
  // back.
  void unscale(auto& optimizer, Gradients& gradients, double factor) {
    open_ = true;
    for (auto& flag : flags_) flag.used = false;
    gradients.each_kind(optimizer, [&](std::vector<at::Tensor>& list) {
      Flag& flag = flag_on(list[0].device(), factor);
      at::_amp_foreach_non_finite_check_and_unscale_(list, flag.found, flag.factor);
    });
  }

  // Closes the window. One device read whatever the number of devices and dtypes, none when there were no gradients.
  bool overflowed() {
    open_ = false;
    const auto used = [](const Flag& flag) { return flag.used; };
    // An accelerator collects the flags of the others: the other way round would be a second read.
    auto home = std::ranges::find_if(flags_, [](const Flag& flag) { return flag.used && !flag.found.is_cpu(); });
    if (home == flags_.end()) home = std::ranges::find_if(flags_, used);
    if (home == flags_.end()) return false;
    for (auto& flag : flags_)
      if (flag.used && &flag != &*home) home->found.add_(flag.found.to(home->found.device(), /*non_blocking=*/true));
    return home->found.item<float>() != 0.0F;
  }

 private:
  struct Flag {
    at::Tensor found, factor;  // 0-dim float32 on one device
    bool used;
  };

  Flag& flag_on(at::Device device, double factor) {
    auto flag = std::ranges::find_if(flags_, [&](const Flag& known) { return known.found.device() == device; });
    if (flag == flags_.end()) {
      const auto options = at::TensorOptions().device(device).dtype(at::kFloat);
      flag = flags_.insert(flag, Flag{at::empty({}, options), at::empty({}, options), false});
    }
    if (!std::exchange(flag->used, true)) {
      flag->found.zero_();
      flag->factor.fill_(factor);
    }
    return *flag;
  }

  const void* optimizer_;
  bool open_ = false;
  std::vector<Flag> flags_;
};

// The scaler, and what happened since it last moved. Several optimizers may step between two losses; the scale moves
// once for all of them, when the next loss is scaled, so that the gradients of one window all carry the same scale.
class LossScaling {
 public:
  explicit LossScaling(const LossScalerOptions& options) : scaler_(options) {}

  // The scale of the next loss.
  double begin_loss() {
    settle();
    return scaler_.scale();
  }

  void unscale(auto& optimizer, Gradients& gradients, double factor) {
    UnscaledWindow& window = window_of(optimizer);
    TORCH_CHECK(!window.open(),
                "AmpPolicy: unscale() was called twice in one window, which would divide by the scale "
                "twice. Call it once per optimizer, after the last backward() and before step().");
    factor /= scaler_.scale();
    if constexpr (Deferring<std::remove_reference_t<decltype(optimizer)>>) {
      window.open_for_step();
      optimizer.pending.factor *= factor;
    } else {
      window.unscale(optimizer, gradients, factor);
    }
  }

  void abandon(auto& optimizer) { window_of(optimizer).abandon(); }

  // One device read. Throws here, where the step is known, after too many skips in a row.
  bool overflowed(auto& optimizer, Gradients& gradients) {
    if (!window_of(optimizer).open()) unscale(optimizer, gradients, 1.0);
    const bool overflow = found_overflow(window_of(optimizer), optimizer, gradients);
    stepped_ = true;
    overflowed_ |= overflow;
    if (overflow && scaler_.exhausted()) settle();
    return overflow;
  }

  // The scaler as the next loss will find it.
  LossScaler next() const {
    LossScaler scaler = scaler_;
    if (stepped_) overflowed_ ? scaler.overflowed() : scaler.applied();
    return scaler;
  }
  void reset() {
    scaler_.reset();
    forget_windows();
  }
  void load(auto& in) {
    scaler_.load(in);
    forget_windows();
  }

 private:
  void forget_windows() {
    windows_.clear();
    stepped_ = overflowed_ = false;
  }
  // Gradients that are still scaled have been measured by clipping, or are so now: one reading pass instead of one that
  // writes. A norm that is not finite may be one that overflowed, so that case is looked at closely.
  bool found_overflow(UnscaledWindow& window, auto& optimizer, Gradients& gradients) {
    if constexpr (Deferring<std::remove_reference_t<decltype(optimizer)>>) {
      auto& size = optimizer.pending.size;
      if (!size) size = norm_.of(optimizer, gradients, Norm::two);
      window.abandon();
      if (std::isfinite(size->read())) return false;
      window.unscale(optimizer, gradients, 1.0);
    }
    return window.overflowed();
  }
  void settle() {
    if (!std::exchange(stepped_, false)) return;
    std::exchange(overflowed_, false) ? scaler_.overflowed() : scaler_.applied();
  }

  UnscaledWindow& window_of(auto& optimizer) {
    const void* const id = identity_of(optimizer);
    const auto known = std::ranges::find_if(windows_, [&](const auto& window) { return window.belongs_to(id); });
    return known != windows_.end() ? *known : windows_.emplace_back(id);
  }

  LossScaler scaler_;
  std::vector<UnscaledWindow> windows_;  // one per optimizer
  GradientNorm norm_;
  bool stepped_ = false, overflowed_ = false;
};

}  // namespace frugal::inline v0::detail
