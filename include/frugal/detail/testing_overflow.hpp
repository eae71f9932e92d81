#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace frugal::inline v0::testing {

/// A loss function whose gradients, not its value, are infinite at chosen calls: the overflow that fp16 has to survive,
/// at a step of your choice and in any precision.
///
///     frugal::testing::OverflowAt overflowing{loss, {3, 4}};            // the fourth and the fifth call
///     frugal::Trainer trainer{model, optimizer, overflowing, AmpPolicy<Fp16>(device)};
///     assert(trainer.progress().skipped == 2);                          // after five or more batches
///
/// Calls are counted from 0, one per micro-batch, calls without gradient recording (a validation) included. The loss
/// may be a tensor or Weighted. Copies share the count: keep one, give one away.
template <class Loss>
class OverflowAt {
 public:
  OverflowAt(Loss loss, std::vector<std::int64_t> calls)
      : loss_(std::move(loss)), calls_(std::move(calls)), made_(std::make_shared<std::int64_t>(0)) {}

  /// What `loss(arguments...)` returns. Throws on one of the chosen calls when the loss records no gradients although
  /// gradients are being recorded: nothing would overflow.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    auto value = loss_(std::forward<Arguments>(arguments)...);
    if (std::ranges::find(calls_, (*made_)++) != calls_.end()) {
      constexpr bool weighted = requires { value.weight; };
      if constexpr (weighted) overflow(value.loss);
      else overflow(value);
    }
    return value;
  }

  /// How often it was called.
  std::int64_t calls() const { return *made_; }

 private:
  static void overflow(const at::Tensor& loss) {
    if (!c10::GradMode::is_enabled()) return;
    TORCH_CHECK(loss.requires_grad(),
                "OverflowAt: the loss has no gradients that could overflow. Compute it from parameters.");
    loss.register_hook(
        [](const at::Tensor& gradient) { return at::Tensor(gradient.mul(std::numeric_limits<double>::infinity())); });
  }

  Loss loss_;
  std::vector<std::int64_t> calls_;
  std::shared_ptr<std::int64_t> made_;
};

}  // namespace frugal::inline v0::testing
