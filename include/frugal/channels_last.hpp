#pragma once

#include <frugal/detail/channels_last.hpp>
#include <frugal/detail/guarded_optimizer.hpp>
#include <frugal/detail/module.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <map>
#include <vector>

/// Channels-last order for convolution models: one call for the model and its batches.
///
///     frugal::to_channels_last(model, batches);                       // early: before resume() and before the first step
///
///     frugal::to_channels_last(model);                                // in a loop of your own
///     auto loss = loss_of(model(frugal::channels_last(images)));
///
/// LibTorch stores images (N, C, H, W) plane by plane. Channels-last keeps shapes, indices and values, and stores the
/// channels of each pixel side by side. That is the order in which the fast convolutions of oneDNN and cuDNN compute;
/// what lies otherwise is often converted, in and out, at every call. Activations follow the order of inputs and weights
/// through batch norm, pooling and pointwise functions. The benchmark suite measures what it gains: most where matrix
/// units compute in bf16 or fp16, little where the channels are few. A model without weights of four or five dimensions
/// gains nothing, and is left alone.
///
/// What stays: the parameters are the same objects, so optimizers, averages and hooks go on with them; the values, bit
/// for bit; checkpoints, which hold values in the usual order and go into models of either; fingerprints and positions
/// of batches; the order itself in to(device), in copies and in autocast.
///
/// What changes: results, by rounding, since other kernels add in another order. A run that is to resume bit for bit
/// calls this in every process. `view` on an activation may throw: write flatten or reshape, which copy once behind the
/// last convolution. As with Module::to(device), memory is replaced: a detached copy of a weight that you keep goes on
/// with the old values.
///
/// What it costs: one copy of the weights, once, and one of a data set in tensors, which is there twice for as long as
/// you hold it too; batches of it then cost nothing more. Batches that a function fetches are copied, one by one, on the
/// thread that fetches, unless it returns them in this order. Snapshots for checkpoints take longer on a CPU.
namespace frugal::inline v0 {

/// The same values in channels-last order: a copy, or the tensor itself when it lies so, and when it has neither four
/// nor five dimensions. The order of a tensor of volumes is channels_last_3d.
inline at::Tensor channels_last(const at::Tensor& tensor) { return detail::in_channels_last_order(tensor); }

namespace detail {

// Calls visit(tensor) for the floating-point parameters and buffers that have dimensions of space and all of their memory
// to themselves. A view of other memory, or one of two that share it, would be torn from it.
void each_spatial_weight(auto& module, auto&& visit) {
  std::map<const void*, const void*> owners;  // by storage; null: several
  const auto each = [&](auto&& use) {
    for (const at::Tensor& tensor : module.parameters()) use(tensor);
    if constexpr (requires { module.buffers(); })
      for (const at::Tensor& tensor : module.buffers()) use(tensor);
  };
  const auto storage = [](const at::Tensor& tensor) -> const void* { return tensor.storage().unsafeGetStorageImpl(); };
  each([&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    const auto [at, fresh] = owners.try_emplace(storage(tensor), tensor.unsafeGetTensorImpl());
    if (at->second != tensor.unsafeGetTensorImpl()) at->second = nullptr;
  });
  std::vector<at::Tensor> found;  // first, since visiting changes where they are
  each([&](const at::Tensor& tensor) {
    if (!channels_last_format(tensor) || !tensor.is_floating_point() || tensor.is_inference()) return;
    if (tensor.storage().nbytes() == tensor.nbytes() && owners.at(storage(tensor))) found.push_back(tensor);
  });
  for (const at::Tensor& tensor : found) visit(tensor);
}

// Whether there are weights in channels-last order now. Gradients take the order of their weights: they are accumulated
// in the one that they have.
inline bool order_weights(auto& module) {
  const c10::NoGradGuard no_grad;
  bool any = false;
  each_spatial_weight(module, [&](const at::Tensor& weight) {
    if (!in_channels_last(weight)) weight.set_data(in_channels_last_order(weight.detach()));
    take_order_of(weight, weight.grad());
    any = any || in_channels_last(weight);
  });
  return any;
}

// State that was made before its parameter was ordered. FusedStep leaves such parameters to torch::optim, which is right
// but slow.
inline void order_state(torch::optim::Optimizer& optimizer) {
  const c10::NoGradGuard no_grad;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end() || !found->second || !in_channels_last(parameter)) continue;
      each_state_tensor(*found->second, [&](const at::Tensor& tensor) { take_order_of(parameter, tensor); });
    }
}

template <class Other>
void order_other(Other& other) {
  constexpr bool batches = requires { other.to_channels_last(); };
  constexpr bool optimizer = std::derived_from<Other, torch::optim::Optimizer>;
  static_assert(batches || optimizer,
                "to_channels_last: behind the model it takes Batches and LibTorch's optimizers. Write "
                "`channels_last(tensor)` for a tensor of your own.");
  if constexpr (batches) other.to_channels_last();
  else if constexpr (optimizer) order_state(other);
}

}  // namespace detail

/// Stores the model's floating-point parameters and buffers of four and five dimensions, with their gradients, in
/// channels-last order, and makes `others` follow: Batches yield their images so from now on, an optimizer's state takes
/// the order of its parameters (needed only when it has made steps already). The model is a Module, a ModuleHolder or a
/// shared_ptr. Returns whether it has such weights; without any, nothing happens to anything. Safe to call again.
///
/// Weights that share memory with one another or are views of larger memory keep their order. Not while a loop over
/// these batches runs, nor between a forward pass and its backward pass. torch::load puts weights back into the order of
/// the file: load first.
bool to_channels_last(auto& model, auto&... others) {
  if (!detail::order_weights(detail::module_of(model))) return false;
  (detail::order_other(others), ...);
  return true;
}

}  // namespace frugal::inline v0
