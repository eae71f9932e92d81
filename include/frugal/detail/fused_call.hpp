#pragma once

#include <frugal/detail/borrowed.hpp>
#include <frugal/detail/fused_kernels.hpp>
#include <frugal/detail/pending.hpp>
#include <frugal/detail/threads.hpp>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace frugal::inline v0::detail {

// One kernel call: parameters of one device, one dtype and one step number, with their gradients and their state side by
// side. Kept between steps and emptied after each.
//
// The kernels are called below autograd, which would copy every list; it is told here that the parameters changed.
class FusedCall {
 public:
  // On a CPU with several threads: every kernel call hands each tensor to all threads, which costs more than a small one
  // takes. Small ones are therefore dealt out, so that each thread gets some of them.
  static constexpr std::int64_t small = std::int64_t{1} << 14;

  FusedCall(const at::Tensor& parameter, std::int64_t step, bool dealt)
      : device_(parameter.device()), dtype_(parameter.scalar_type()), step_(step), dealt_(dealt) {}

  bool empty() const { return parameters_.empty(); }
  bool takes(const at::Tensor& parameter, bool dealt) const {
    return dtype_ == parameter.scalar_type() && dealt_ == dealt && device_ == parameter.device();
  }
  std::int64_t step() const { return step_; }
  void begin(std::int64_t step) { step_ = step; }

  void add(const at::Tensor& parameter, const at::Tensor& gradient) {
    parameters_.push_back(parameter);
    gradients_.push_back(gradient);
    changed(parameter);
    if (dealt_) ends_.push_back((ends_.empty() ? 0 : ends_.back()) + parameter.numel() + by_itself);
  }
  void add_state(std::size_t which, const at::Tensor& state) { state_[which].push_back(state); }

  template <class Kernel>
  void run(const typename Kernel::Options& options, const PendingScale& pending) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    count();
    const FusedLists all{.parameters = parameters_.list(),
                         .gradients = gradients_.list(),
                         .state = {state_[0].list(), state_[1].list(), state_[2].list()},
                         .steps = at::TensorList(steps_).slice(0, parameters_.size()),
                         .divisor = divisor(pending),
                         .skip = skip(pending)};
    const auto parts = dealt_ ? std::min<std::int64_t>(at::get_num_threads(), std::ssize(ends_)) : 1;
    if (parts == 1) return Kernel::call(options, step_, all);
    threads_.each(parts, [&](std::int64_t part) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd_there;
      const std::size_t first = first_of(part, parts), last = first_of(part + 1, parts);
      if (first < last) Kernel::call(options, step_, all.slice(first, last - first));
    });
  }

  void clear() {
    parameters_.clear();
    gradients_.clear();
    for (Borrowed& list : state_) list.clear();
    ends_.clear();
  }

 private:
  static void changed(const at::Tensor& tensor) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }

  static constexpr std::int64_t by_itself = 1024;  // what a tensor without elements takes, in elements

  // The tensors of a part are those that end in it.
  std::size_t first_of(std::int64_t part, std::int64_t parts) const {
    return static_cast<std::size_t>(std::ranges::upper_bound(ends_, ends_.back() * part / parts) - ends_.begin());
  }

  void count() {
    if (!counter_.defined()) counter_ = at::empty({}, at::TensorOptions().device(device_).dtype(at::kFloat));
    if (device_.is_cpu()) *counter_.mutable_data_ptr<float>() = static_cast<float>(step_);
    else counter_.fill_(static_cast<double>(step_));
    if (steps_.size() < parameters_.size()) steps_.resize(parameters_.size(), counter_);
  }

  // Nothing where the gradients are as they should be. They are made so here where the kernel's division would be wrong: it
  // divides by a float, which is too coarse for double, and on a CPU in the dtype of the gradients, where 16 bits overflow.
  std::optional<at::Tensor> divisor(const PendingScale& pending) {
    if (pending.settled()) return std::nullopt;
    const double by = 1.0 / pending.factor;
    if (divides_on_cpu(pending, by) && std::abs(by - 1) <= std::numeric_limits<float>::epsilon()) return std::nullopt;
    for (const at::Tensor& gradient : gradients_.list()) changed(gradient);
    if (device_.is_cpu() ? !divides_on_cpu(pending, by) : dtype_ == at::kDouble)
      return pending.multiply(gradients_.list()), std::nullopt;
    if (!divisor_.defined()) divisor_ = at::empty({}, at::TensorOptions().device(device_).dtype(at::kFloat));
    if (device_.is_cpu()) *divisor_.mutable_data_ptr<float>() = static_cast<float>(by);
    else if (!pending.coefficient.defined()) divisor_.fill_(by);
    else divisor_ = pending.coefficient.to(device_, /*non_blocking=*/true).mul(pending.factor).reciprocal();
    return divisor_;
  }
  std::optional<at::Tensor> skip(const PendingScale& pending) const {
    if (!pending.skip.defined()) return std::nullopt;
    return pending.skip.to(device_, /*non_blocking=*/true);
  }
  bool divides_on_cpu(const PendingScale& pending, double by) const {
    using Float = std::numeric_limits<float>;
    const bool fits = std::abs(by) >= Float::min() && std::abs(by) <= Float::max();
    if (!device_.is_cpu() || pending.coefficient.defined() || !fits) return false;
    return dtype_ == at::kFloat || (dtype_ == at::kDouble && 1.0 / static_cast<float>(by) == pending.factor);
  }

  at::Device device_;
  at::ScalarType dtype_;
  std::int64_t step_;
  bool dealt_;
  Borrowed parameters_, gradients_;
  std::array<Borrowed, 3> state_;
  std::vector<std::int64_t> ends_;  // where each tensor ends, in elements
  std::vector<at::Tensor> steps_;   // the kernels want a tensor per parameter and only read it: all are `counter_`
  at::Tensor counter_, divisor_;
  Threads threads_;
};

}  // namespace frugal::inline v0::detail
