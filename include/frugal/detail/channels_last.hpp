#pragma once

#include <frugal/detail/device_copy.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>

#include <cstdint>
#include <optional>

// The order of images, and of volumes, in memory: (N, C, H, W) stored as it is written, or with the channels of a pixel
// side by side.
namespace frugal::inline v0::detail {

// LibTorch's name of channels-last order for this tensor; none without two or three dimensions of space.
inline std::optional<at::MemoryFormat> channels_last_format(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) return std::nullopt;
  if (tensor.dim() == 4) return at::MemoryFormat::ChannelsLast;
  if (tensor.dim() == 5) return at::MemoryFormat::ChannelsLast3d;
  return std::nullopt;
}

// As the kernels see it, by the strides; those of dimensions of size 1 count too.
inline bool in_channels_last(const at::Tensor& tensor) {
  const auto format = channels_last_format(tensor);
  return format && tensor.suggest_memory_format() == *format;
}

// By to(): contiguous() leaves a tensor with one channel, or of one pixel, as it is, and the kernels then take it for the
// other order.
inline at::Tensor in_channels_last_order(const at::Tensor& tensor) {
  const auto format = channels_last_format(tensor);
  return format ? tensor.to(tensor.options(), /*non_blocking=*/false, /*copy=*/false, format) : tensor;
}

// Every tensor in a batch of any type.
void order_channels_last(auto& batch) {
  const auto order = [](at::Tensor& part) { part = in_channels_last_order(part); };
  const auto left = [](auto&) {};
  visit_parts(batch, order, left);
}

// `count` samples from number `first` of `order` on, in the order in memory that `all` has: a copy, or a view where there
// is no order. Whole samples are copied as they lie, so channels-last costs nothing; index_select of the tensor as it is
// would give the other order, element by element. On their way to a device with a copy engine they are gathered where it
// can fetch them.
inline at::Tensor gather(const at::Tensor& all, const at::Tensor& order, std::int64_t first, std::int64_t count,
                         at::Device device) {
  if (!order.defined()) return all.narrow(0, first, count);
  const at::Tensor index = order.narrow(0, first, count).to(all.device());
  const bool last = in_channels_last(all);
  const at::Tensor rows = last ? all.movedim(1, -1) : all;
  at::Tensor picked;
  if (has_copy_engine(device) && all.is_cpu()) {
    auto shape = rows.sizes().vec();
    shape[0] = count;
    picked = at::empty(shape, rows.options().pinned_memory(true));
    at::index_select_out(picked, rows, 0, index);
  } else {
    picked = rows.index_select(0, index);
  }
  return last ? picked.movedim(-1, 1) : picked;
}

// Gives `tensor` the strides of `like`, which has its shape, in new memory: the same object with the same values.
inline void take_order_of(const at::Tensor& like, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.sizes() != like.sizes()) return;
  if (tensor.strides() == like.strides()) return;
  const auto options = at::TensorOptions(tensor.scalar_type()).device(tensor.device());
  tensor.set_data(at::empty_like(like.detach(), options).copy_(tensor.detach()));
}

}  // namespace frugal::inline v0::detail
