#pragma once

#include <frugal/detail/gradients.hpp>
#include <frugal/detail/late_flag.hpp>
#include <frugal/detail/open_answers.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// One optimizer's unfinished window: the pass over its gradients and what that found. Kept between steps with its
// scratch tensors, one pair per device.
class UnscaledWindow {
 public:
  explicit UnscaledWindow(Identity optimizer) : optimizer_(std::move(optimizer)) {}

  bool belongs_to(const Identity& optimizer) const { return optimizer_ == optimizer; }
  bool is_gone() const { return optimizer_.is_gone(); }
  bool open() const { return open_; }
  void open_for_step() { open_ = true; }
  void abandon() { open_ = false; }

  // Whether the last step was skipped, where that is not read at once.
  void start_late(const at::Tensor& flag) {
    answer_ = OpenAnswer(optimizer_);
    late_.start(flag);
  }
  bool is_late() const { return late_.under_way(); }
  const LateFlag& late() const { return late_; }
  bool learn() {
    learned_ = late_.read();
    late_.forget();
    return *learned_;
  }
  // It is late, or it was read but nobody was told.
  bool has_news() const { return is_late() || learned_; }
  bool tell() {
    answer_ = OpenAnswer();
    return *std::exchange(learned_, std::nullopt);
  }

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

  Identity optimizer_;
  bool open_ = false;
  std::vector<Flag> flags_;
  LateFlag late_;
  std::optional<bool> learned_;
  OpenAnswer answer_;
};

}  // namespace frugal::inline v0::detail
