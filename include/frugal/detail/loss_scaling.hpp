#pragma once

#include <frugal/amp_options.hpp>
#include <frugal/detail/gradient_norm.hpp>
#include <frugal/detail/gradients.hpp>
#include <frugal/detail/pending.hpp>
#include <frugal/detail/unscaled_window.hpp>
#include <frugal/loss_scaler.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// The scaler, and what happened since it last moved. Several optimizers may step between two losses; the scale moves
// once for all of them, when the next loss is scaled, so that the gradients of one window all carry the same scale.
//
// Lagged: when the next loss is scaled, it is known on the device alone whether the last steps were skipped, and the device
// picks one of the two scales that the host has worked out. The host reads which one before it unscales that window.
class LossScaling {
 public:
  LossScaling(const LossScalerOptions& options, SkipDecision decision)
      : scaler_(options), lags_(decision == SkipDecision::lagged) {}

  // What a reason says of it.
  const char* note() const { return lags_ ? " Where FusedStep steps, skips are learned late." : ""; }

  // `loss` is float or double.
  at::Tensor scaled(const at::Tensor& loss) {
    if (!scale_on_device_.defined()) {
      if (std::ranges::none_of(windows_, &UnscaledWindow::is_late)) {
        settle();
        return loss.mul(scaler_.scale());
      }
      scale_on_device_ = next_on_device();
    }
    return loss.mul(scale_on_device_.to(loss.device(), /*non_blocking=*/true));
  }

  void unscale(auto& optimizer, Gradients& gradients, double factor) {
    move_if_begun();
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

  // Whether the window must not be stepped. One device read; throws here, where the step is known, after too many skips in
  // a row. Lagged: no read, and no answer but `pending.skip`, which has the step do nothing.
  bool overflowed(auto& optimizer, Gradients& gradients) {
    if (!window_of(optimizer).open()) unscale(optimizer, gradients, 1.0);
    UnscaledWindow& window = window_of(optimizer);
    expect_none_open("AmpPolicy: step()", window.has_news());
    stepped_ = true;
    if constexpr (Revocable<std::remove_reference_t<decltype(optimizer)>>)
      if (lags_) {
        window.abandon();
        window.start_late(optimizer.pending.skip = overflow_flag(window, optimizer, gradients));
        return false;
      }
    const bool overflow = found_overflow(window, optimizer, gradients);
    overflowed_ |= overflow;
    if (overflow && scaler_.exhausted()) settle();
    return overflow;
  }

  // Whether the last step of this optimizer, or of any, still has no answer.
  bool unanswered(auto& optimizer) { return window_of(optimizer).has_news(); }
  bool unanswered() const {
    return std::ranges::any_of(windows_, [](const UnscaledWindow& one) { return one.has_news() && !one.is_gone(); });
  }
  // That answer: whether it was skipped.
  bool answer(auto& optimizer) {
    UnscaledWindow& window = window_of(optimizer);
    if (!window.has_news()) return false;
    if (window.is_late()) learn();
    return window.tell();
  }
  // Moves the scale for losses that were scaled on the device by now. Throws after too many skips in a row.
  void move() {
    move_if_begun();
    if (overflowed_ && scaler_.exhausted()) settle();
  }

  // The scaler as the next loss will find it. Lagged: reads what there is to read.
  LossScaler next() const {
    LossScaler scaler = scaler_;
    bool overflow = overflowed_;
    for (const UnscaledWindow& window : windows_) overflow |= window.is_late() && window.late().read();
    if (stepped_) overflow ? scaler.overflowed() : scaler.applied();
    return scaler;
  }
  void reset() {
    scaler_.reset();
    forget_windows();
  }
  // `scales`: there is a scaler from now on, which stays as it is if the state has none.
  void load(auto& in, bool scales) {
    if (scales && !in.has("scale")) return;
    if (scales) scaler_.load(in);
    forget_windows();
  }
  void forget_windows() {
    windows_.clear();
    scale_on_device_.reset();
    stepped_ = overflowed_ = false;
  }

 private:
  // Gradients that are still scaled have been measured by clipping, or are so now: one reading pass instead of one that
  // writes. A norm that is not finite may be one that overflowed, so that case is looked at closely.
  bool found_overflow(UnscaledWindow& window, auto& optimizer, Gradients& gradients) {
    if constexpr (Deferring<std::remove_reference_t<decltype(optimizer)>>) {
      window.abandon();
      if (std::isfinite(size_of(optimizer, gradients).read())) return false;
      window.unscale(optimizer, gradients, 1.0);
    }
    return window.overflowed();
  }
  const GradientSize& size_of(auto& optimizer, Gradients& gradients) {
    auto& size = optimizer.pending.size;
    if (!size) size = norm_.of(optimizer, gradients, Norm::two);
    return *size;
  }
  // The same without a read from a device, as a float of no dimension. There, a norm that overflows counts as an overflow: nobody
  // can look closely.
  at::Tensor overflow_flag(UnscaledWindow& window, auto& optimizer, Gradients& gradients) {
    const GradientSize& size = size_of(optimizer, gradients);
    if (size.device.defined()) return size.device.isfinite().logical_not().to(at::kFloat);
    return at::scalar_tensor(found_overflow(window, optimizer, gradients) ? 1.0 : 0.0, at::kFloat);
  }

  at::Tensor next_on_device() const {
    LossScaler after_overflow = scaler_, after_step = scaler_;
    after_step.applied();
    if (after_overflow.exhausted()) after_overflow = after_step;  // an error when it is read: no loss counts any more
    else after_overflow.overflowed();
    at::Tensor any;
    for (const UnscaledWindow& window : windows_)
      if (window.is_late()) {
        const at::Tensor& flag = window.late().on_device();
        any = any.defined() ? any.add(flag.to(any.device(), /*non_blocking=*/true)) : flag;
      }
    const auto scale = [&](double value) { return at::scalar_tensor(value, any.options().dtype(at::kDouble)); };
    return at::where(any.add(overflowed_ ? 1.0 : 0.0).gt(0), scale(after_overflow.scale()), scale(after_step.scale()));
  }
  // A loss was scaled since the last steps, by what the device knew of all of them; else the next loss moves the scale.
  void move_if_begun() {
    if (!scale_on_device_.defined()) return;
    learn();
    scale_on_device_.reset();
    settle();
  }
  // Reads all that is late. That was queued before the losses scaled since, so it does not wait for them.
  void learn() {
    for (UnscaledWindow& window : windows_)
      if (window.is_late()) overflowed_ |= window.learn();
  }
  void settle() {
    if (!std::exchange(stepped_, false)) return;
    std::exchange(overflowed_, false) ? scaler_.overflowed() : scaler_.applied();
  }

  UnscaledWindow& window_of(auto& optimizer) {
    const auto known = std::ranges::find_if(
        windows_, [id = identity_of(optimizer)](const UnscaledWindow& window) { return window.belongs_to(id); });
    if (known != windows_.end()) return *known;
    learn();  // what those that are gone have to say of the scale
    std::erase_if(windows_, &UnscaledWindow::is_gone);
    return windows_.emplace_back(identity_of(optimizer));
  }

  LossScaler scaler_;
  bool lags_;
  std::vector<UnscaledWindow> windows_;  // one per optimizer
  GradientNorm norm_;
  at::Tensor scale_on_device_;  // of the losses since the last steps, while the host does not know it; else undefined
  bool stepped_ = false, overflowed_ = false;
};

}  // namespace frugal::inline v0::detail
