#pragma once

#include <frugal/detail/threads.hpp>
#include <frugal/detail/vectors.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <cstdint>
#include <memory>
#include <mutex>

namespace frugal::inline v0::detail {

// Numbers in host memory and nothing else: no wrapper, no other layout, no pending negation, not made in inference mode,
// no tangent. An undefined tensor is none.
inline bool is_plain(const at::Tensor& tensor) {
  using Key = c10::DispatchKey;
  constexpr c10::DispatchKeySet plain({Key::CPU, Key::ADInplaceOrView, Key::AutogradCPU, Key::AutocastCPU});
  return tensor.key_set() == plain && !tensor._fw_grad(/*level=*/0).defined();
}

// The node behind the cast of a weight. LibTorch casts the gradient to float32, then adds it to the weight's: 18 bytes of
// memory traffic per element and memory for the cast. Where the two are all that would happen this adds in one pass, 10
// bytes, to the same bits, and hands on nothing. Everywhere else it casts, and the weight's AccumulateGrad goes on as ever.
class CastNode : public torch::autograd::Node {
 public:
  explicit CastNode(const at::Tensor& weight) { add_next_edge(torch::autograd::impl::gradient_edge(weight)); }

 private:
  using Node = torch::autograd::Node;
  static constexpr std::int64_t small = std::int64_t{1} << 16, most = 64;  // elements for one thread; parts for several

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    at::Tensor& gradient = gradients[0];
    if (gradient.defined()) gradient = added(gradient) ? at::Tensor() : gradient.to(at::kFloat);
    return gradients;
  }

  bool added(const at::Tensor& gradient) {
    const auto& accumulator = next_edge(0).function;
    // An edge from elsewhere: LibTorch sums the gradients of all edges before it adds them to the weight's.
    const bool only_edge = accumulator.use_count() == 1;
    if (!accumulates() || !only_edge || has_hooks(*accumulator)) return false;
    const std::lock_guard lock((*accumulator).*(&CastNode::mutex_));  // which AccumulateGrad takes for the same reason
    const at::Tensor& weight = static_cast<const torch::autograd::AccumulateGrad&>(*accumulator).variable;
    if (!weight.is_leaf() || !weight.requires_grad()) return false;
    const at::Tensor& total = weight.grad();
    if (!side_by_side(total, gradient)) return false;
    if (gradient.scalar_type() == at::kBFloat16) add<at::BFloat16>(total, gradient);
    else add<at::Half>(total, gradient);
    total.unsafeGetTensorImpl()->bump_version();
    return true;
  }

  // Not grad(), nor backward() to chosen inputs, nor with create_graph, nor a call of the node outside of any. Anomaly mode
  // looks at what every node returns.
  static bool accumulates() {
    const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
    return chosen && chosen->empty() && !c10::GradMode::is_enabled() && !torch::autograd::AnomalyMode::is_enabled();
  }
  // Whoever would see the gradient on its way.
  bool has_hooks(Node& accumulator) const {
    return !post_hooks().empty() || !accumulator.pre_hooks().empty() || !accumulator.post_hooks().empty() ||
           !accumulator.tensor_pre_hooks().empty() || accumulator.tensor_post_acc_grad_hooks();
  }
  static bool side_by_side(const at::Tensor& total, const at::Tensor& gradient) {
    const at::ScalarType low = gradient.scalar_type();
    return is_plain(total) && is_plain(gradient) && total.scalar_type() == at::kFloat &&
           (low == at::kBFloat16 || low == at::kHalf) && total.is_non_overlapping_and_dense() &&
           total.sizes() == gradient.sizes() && total.strides() == gradient.strides();
  }

  template <class Low>
  static void add(const at::Tensor& total, const at::Tensor& gradient) {
    float* const to = total.mutable_data_ptr<float>();
    const Low* const from = gradient.const_data_ptr<Low>();
    const std::int64_t count = total.numel();
    if (count < small) return add_widened(to, from, count);
    static thread_local Threads threads;  // backward may run in several threads of the user
    threads.each(most, [&](std::int64_t part) {
      const std::int64_t first = count * part / most;
      add_widened(to + first, from + first, count * (part + 1) / most - first);
    });
  }
};

// The cast of a leaf weight that requires a gradient, with gradient recording. Half the memory traffic of weight.to(dtype) in
// backward, where the weight is plain.
inline at::Tensor recorded_cast(const at::Tensor& weight, at::ScalarType dtype) {
  if ((dtype != at::kBFloat16 && dtype != at::kHalf) || !is_plain(weight)) return weight.to(dtype);
  at::Tensor cast = [&] {
    const c10::NoGradGuard off;
    return weight.to(dtype);
  }();
  using Pointer = decltype(torch::autograd::Edge::function);  // shared or intrusive, by LibTorch's version
  torch::autograd::create_gradient_edge(cast, Pointer(std::make_unique<CastNode>(weight)));
  return cast;
}

}  // namespace frugal::inline v0::detail
