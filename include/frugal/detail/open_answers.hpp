#pragma once

#include <frugal/detail/groups.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <concepts>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// Held while nobody knows whether the last step of an optimizer was skipped (SkipDecision::lagged): what it has counted may
// be taken back. Whoever would keep that, or average the weights, asks first; nothing but the optimizer or the model is at
// hand there, so these are known to the process. A lock, and no allocation in a steady loop.
class OpenAnswer {
 public:
  OpenAnswer() = default;
  explicit OpenAnswer(const Identity& optimizer) {
    if (optimizer.is_gone()) return;
    const std::lock_guard lock(mutex());
    std::erase_if(all(), &Identity::is_gone);
    all().push_back(optimizer);
    optimizer_.emplace(optimizer);
  }
  OpenAnswer(OpenAnswer&& other) noexcept : optimizer_(std::exchange(other.optimizer_, std::nullopt)) {}
  OpenAnswer& operator=(OpenAnswer&& other) noexcept {
    std::swap(optimizer_, other.optimizer_);
    return *this;
  }
  ~OpenAnswer() {
    if (!optimizer_) return;
    const std::lock_guard lock(mutex());
    if (const auto at = std::ranges::find(all(), *optimizer_); at != all().end()) all().erase(at);
  }

  // Whether there is one of an optimizer that `belongs(identity)`.
  static bool among(auto&& belongs) {
    const std::lock_guard lock(mutex());
    return std::ranges::any_of(all(), belongs);
  }

 private:
  // Never destroyed: a policy with static storage may go last.
  static std::mutex& mutex() {
    static auto& one = *new std::mutex;
    return one;
  }
  static std::vector<Identity>& all() {
    static auto& list = *new std::vector<Identity>;
    return list;
  }

  std::optional<Identity> optimizer_;
};

inline void expect_none_open(const char* who, bool open) {
  TORCH_CHECK(
      !open, who,
      " while it is not known whether the last step was skipped (SkipDecision::lagged), and the optimizer may have "
      "counted it. Call frugal::settle(optimizer, amp, fused) first, or the Trainer's progress().");
}
// `who` does what. An optimizer without tensors has no open answer.
template <class Optimizer>
void expect_answered(const char* who, Optimizer& optimizer) {
  if constexpr (requires {
                  { *optimizer.param_groups().begin()->params().begin() } -> std::convertible_to<const at::Tensor&>;
                })
    expect_none_open(who, OpenAnswer::among([&](const Identity& open) { return open == identity_of(optimizer); }));
}
void expect_answered_for_module(const char* who, const auto& module) {
  expect_none_open(who, OpenAnswer::among([&](const Identity& open) {
                     const auto is_it = [&](const at::Tensor& parameter) { return open.is(parameter); };
                     return std::ranges::any_of(module.parameters(), is_it);
                   }));
}

}  // namespace frugal::inline v0::detail
