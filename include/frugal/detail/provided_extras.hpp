#pragma once

#include <frugal/amp_options.hpp>
#include <frugal/detail/autocast.hpp>
#include <frugal/detail/autocast_kernels.hpp>
#include <frugal/detail/precision_choice.hpp>

#include <c10/core/DeviceType.h>

#include <memory>

namespace frugal::inline v0::detail {

// What a policy's regions need beyond LibTorch's autocast, and its shares in the kernels that provide it.
class ProvidedExtras {
 public:
  void provide(const PrecisionChoice& choice, at::DeviceType device) {
    const bool attention = choice.attention == Attention::fp32, casts = choice.weight_casts == WeightCasts::per_step;
    attention_ = attention ? KernelShare(KernelShare::Kind::attention, device) : KernelShare();
    casts_ = casts ? KernelShare(KernelShare::Kind::weights, device) : KernelShare();
    extras_.reset();
    if (attention || casts)
      extras_ = std::make_unique<AutocastExtras>(AutocastExtras{.attention_in_float = attention, .keeps_casts = casts});
  }

  // Null: nothing.
  AutocastExtras* get() const { return extras_.get(); }
  // The weights changed: releases the memory of their casts, too.
  void stepped() {
    if (extras_) extras_->casts.clear();
  }

 private:
  std::unique_ptr<AutocastExtras> extras_;  // where it stays when the policy moves
  KernelShare attention_, casts_;
};

}  // namespace frugal::inline v0::detail
