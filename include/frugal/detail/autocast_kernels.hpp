#pragma once

#include <frugal/detail/autocast.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/conv1d_ops.h>
#include <ATen/ops/conv2d_ops.h>
#include <ATen/ops/conv3d_ops.h>
#include <ATen/ops/conv_transpose1d_ops.h>
#include <ATen/ops/conv_transpose2d_ops.h>
#include <ATen/ops/conv_transpose3d_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/scaled_dot_product_attention_ops.h>
#include <ATen/ops/t_ops.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

// Kernels of ours for the dispatcher's autocast key. They ask the running region (running_extras) what it wants; in a
// region that wants nothing, which may be a user's own, they do what LibTorch's kernels do.
namespace at::autocast {
TORCH_API at::Tensor cached_cast(at::ScalarType to_type, const at::Tensor& arg, c10::DeviceType device_type);
}

namespace frugal::inline v0::detail {

constexpr c10::DispatchKey autocast_key(at::DeviceType device) {
  return device == at::kCPU ? c10::DispatchKey::AutocastCPU : c10::DispatchKey::Autocast;  // that of CUDA
}

// Below autocast: what is called while it lives runs in the dtypes of its arguments.
struct BelowAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard;
  explicit BelowAutocast(at::DeviceType device) : guard(c10::DispatchKeySet(autocast_key(device))) {}
};

// In the region's low precision. `as_weight`: a cast that may be kept until the next optimizer step.
template <at::DeviceType Device>
struct Lowered {
  at::ScalarType dtype = at::autocast::get_autocast_dtype(Device);
  AutocastExtras* extras = running_extras;

  at::Tensor operator()(const at::Tensor& tensor) const { return at::autocast::cached_cast(dtype, tensor, Device); }
  at::Tensor as_weight(const at::Tensor& weight) const {
    if (!keeps(weight)) return (*this)(weight);
    const auto [cast, reused] = extras->casts.cast(weight, dtype);
    if (reused) ++extras->reused;
    return cast;
  }
  std::optional<at::Tensor> as_weight(const std::optional<at::Tensor>& weight) const {
    return weight && weight->defined() ? std::optional(as_weight(*weight)) : weight;
  }
  bool keeps(const at::Tensor& weight) const {
    return extras && extras->keeps_casts && c10::GradMode::is_enabled() && CastCache::takes(weight) &&
           weight.device().type() == Device;
  }
};

// Whether `view` is the transposition of `matrix` in its memory and in its graph: its gradient goes to the matrix by LibTorch's
// own node, with no other one between, and nobody looks at it on its way or wants it kept.
inline bool is_transposition(const at::Tensor& matrix, const at::Tensor& view) {
  const bool in_memory = matrix.dim() == 2 && view.size(0) == matrix.size(1) && view.size(1) == matrix.size(0) &&
                         view.stride(0) == matrix.stride(1) && view.stride(1) == matrix.stride(0) &&
                         view.const_data_ptr() == matrix.const_data_ptr();
  if (!in_memory) return false;
  const auto& node = view.grad_fn();
  return node && (node->name() == "TBackward0" || node->name() == "TransposeBackward0") &&
         node->next_edge(0).function == torch::autograd::impl::try_get_grad_accumulator(matrix) &&
         node->tensor_pre_hooks().empty() && node->retains_grad_hooks().empty() && node->pre_hooks().empty() &&
         node->post_hooks().empty();
}

// A layer: (input, weight, bias, ...).
template <class Operator, class Schema = typename Operator::schema>
struct LayerKernel;
template <class Operator, class... Rest>
struct LayerKernel<Operator,
                   at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, Rest...)> {
  template <at::DeviceType Device>
  static at::Tensor call(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         Rest... rest) {
    const Lowered<Device> low;
    const BelowAutocast below(Device);
    return Operator::call(low(input), low.as_weight(weight), low.as_weight(bias), std::forward<Rest>(rest)...);
  }
};

// nn::Linear in C++ is addmm(bias, input, weight.t()), or matmul where there is no bias: autocast sees a transposed view, which
// no cache knows. It is the transposition of a cast that is kept instead; the gradient comes to the weight either way.
template <at::DeviceType Device>
at::Tensor lowered_factor(const Lowered<Device>& low, const at::Tensor& factor) {
  if (!factor.requires_grad() || factor.dim() != 2 || !factor.is_view()) return low(factor);
  const at::Tensor weight(factor._base());
  if (!low.keeps(weight) || !is_transposition(weight, factor)) return low(factor);
  return at::_ops::t::call(low.as_weight(weight));
}
template <at::DeviceType Device>
at::Tensor addmm_kernel(const at::Tensor& bias, const at::Tensor& one, const at::Tensor& other, const at::Scalar& beta,
                        const at::Scalar& alpha) {
  const Lowered<Device> low;
  const BelowAutocast below(Device);
  return at::_ops::addmm::call(low.as_weight(bias), low(one), lowered_factor(low, other), beta, alpha);
}
template <class Operator, at::DeviceType Device>
at::Tensor product_kernel(const at::Tensor& one, const at::Tensor& other) {
  const Lowered<Device> low;
  const BelowAutocast below(Device);
  return Operator::call(low(one), lowered_factor(low, other));
}

template <at::DeviceType Device>
at::Tensor attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const std::optional<at::Tensor>& mask, double dropout, bool causal,
                            std::optional<double> scale, bool grouped) {
  AutocastExtras* const extras = running_extras;
  if (extras) ++extras->attentions;
  const at::ScalarType dtype =
      extras && extras->attention_in_float ? at::kFloat : at::autocast::get_autocast_dtype(Device);
  const auto cast = [&](const at::Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, Device); };
  const BelowAutocast below(Device);
  return at::_ops::scaled_dot_product_attention::call(cast(query), cast(key), cast(value),
                                                      mask && mask->defined() ? std::optional(cast(*mask)) : mask,
                                                      dropout, causal, scale, grouped);
}

// The registrations of one kind on one device; they end with it.
using KernelRegistrations = std::vector<c10::RegistrationHandleRAII>;

template <class Operator, class Function>
void register_kernel(KernelRegistrations& all, at::DeviceType device, Function* kernel) {
  all.push_back(c10::Dispatcher::singleton().registerImpl(
      {Operator::name, Operator::overload_name}, autocast_key(device),
      c10::KernelFunction::makeFromUnboxedRuntimeFunction(kernel), std::nullopt, nullptr, "frugal: AmpPolicy"));
}
template <at::DeviceType Device, class... Operators>
void register_layers(KernelRegistrations& all) {
  (register_kernel<Operators>(all, Device, &LayerKernel<Operators>::template call<Device>), ...);
}

template <at::DeviceType Device>
KernelRegistrations weight_kernels() {
  namespace ops = at::_ops;
  KernelRegistrations all;
  register_kernel<ops::addmm>(all, Device, &addmm_kernel<Device>);
  register_kernel<ops::matmul>(all, Device, &product_kernel<ops::matmul, Device>);
  register_kernel<ops::mm>(all, Device, &product_kernel<ops::mm, Device>);
  register_layers<Device, ops::linear, ops::conv1d, ops::conv2d, ops::conv3d, ops::conv1d_padding, ops::conv2d_padding,
                  ops::conv3d_padding, ops::conv_transpose1d, ops::conv_transpose2d_input, ops::conv_transpose3d_input>(
      all);
  return all;
}
template <at::DeviceType Device>
KernelRegistrations attention_kernels() {
  KernelRegistrations all;
  register_kernel<at::_ops::scaled_dot_product_attention>(all, Device, &attention_kernel<Device>);
  return all;
}

// One owner's share in kernels that act on the whole process: the first owner registers them, the last one takes them
// back. The dispatcher's tables are written without a lock on their readers: begin and end while no other thread
// computes.
class KernelShare {
 public:
  enum class Kind { weights, attention };

  KernelShare() = default;
  KernelShare(Kind kind, at::DeviceType device) : held_(&shared(kind, device)) {
    const std::lock_guard lock(mutex());
    if (held_->owners++ > 0) return;
    const Silence silence;
    const bool cpu = device == at::kCPU;
    if (kind == Kind::weights) held_->kernels = cpu ? weight_kernels<at::kCPU>() : weight_kernels<at::kCUDA>();
    else held_->kernels = cpu ? attention_kernels<at::kCPU>() : attention_kernels<at::kCUDA>();
  }
  KernelShare(KernelShare&& other) noexcept : held_(std::exchange(other.held_, nullptr)) {}
  KernelShare& operator=(KernelShare&& other) noexcept {
    std::swap(held_, other.held_);
    return *this;
  }
  ~KernelShare() {
    if (!held_) return;
    const std::lock_guard lock(mutex());
    if (--held_->owners == 0) held_->kernels.clear();
  }

 private:
  struct Shared {
    std::size_t owners = 0;
    KernelRegistrations kernels;
  };
  // The dispatcher warns, once per process, of a kernel that takes the place of another. That is what is wanted here.
  struct Silence : c10::WarningHandler {
    c10::WarningUtils::WarningHandlerGuard guard{this};
    void process(const c10::Warning&) override {}
  };

  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static Shared& shared(Kind kind, at::DeviceType device) {
    static std::array<std::array<Shared, 2>, 2> all;
    return all[kind == Kind::weights ? 0 : 1][device == at::kCPU ? 0 : 1];
  }

  Shared* held_ = nullptr;
};

}  // namespace frugal::inline v0::detail
