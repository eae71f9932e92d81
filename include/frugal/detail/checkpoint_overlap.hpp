#pragma once

#include <frugal/detail/state_archive.hpp>
#include <frugal/detail/writable.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

// Names that share memory in the model: tied parameters, a buffer that is a view of a parameter. A checkpoint of a model
// where they had memory of their own may hold different values for them, and the last one written would win.
namespace frugal::inline v0::detail {

// Where a tensor lies.
struct Extent {
  const std::string* name;
  const at::Tensor* tensor;
  std::uintptr_t begin, end;  // addresses, on its device
};

inline std::vector<Extent> extents_of(const State& live) {
  std::vector<Extent> all;
  for (const auto& [name, tensor] : live.tensors) {
    if (tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.numel() == 0) continue;
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
    all.push_back({&name, &tensor, begin, begin + static_cast<std::uintptr_t>(last + 1) * tensor.itemsize()});
  }
  const auto place = [](const Extent& one) {
    const at::Device device = one.tensor->device();
    return std::tuple(device.type(), device.index(), one.begin, one.end);
  };
  std::ranges::sort(all, {}, place);
  return all;
}

// Writes the saved values into memory that lies as theirs does, and looks at what is there afterwards. `together` lie on
// one device, each of them overlaps another one.
inline void need_agreement(const State& saved, const std::vector<Extent>& together) {
  const std::uintptr_t begin = together.front().begin;
  std::uintptr_t end = begin;
  for (const Extent& one : together) end = std::max(end, one.end);
  const at::Tensor memory = at::empty({static_cast<std::int64_t>(end - begin)}, at::TensorOptions(at::kByte));
  const auto view = [&](const Extent& one) {
    const at::Tensor& live = *one.tensor;
    const at::Tensor there = at::from_blob(static_cast<std::byte*>(memory.mutable_data_ptr()) + (one.begin - begin),
                                           live.sizes(), live.strides(), at::TensorOptions(live.scalar_type()));
    if (live.is_conj()) there._set_conj(true);
    if (live.is_neg()) there._set_neg(true);
    return there;
  };
  const c10::NoGradGuard no_grad;
  for (const Extent& one : together) write_values(view(one), saved.tensors.at(*one.name));
  for (const Extent& one : together) {
    const at::Tensor back = view(one).resolve_conj().resolve_neg().contiguous();
    const at::Tensor expected = saved.tensors.at(*one.name).contiguous();
    if (std::memcmp(back.const_data_ptr(), expected.const_data_ptr(), expected.nbytes()) == 0) continue;
    const Extent& other = one.name == together.front().name ? together[1] : together.front();
    TORCH_CHECK(
        false, "CheckpointManager: '", *one.name, "' and '", *other.name,
        "' share memory in this model, and their values in the checkpoint do not agree. Restore into a model that "
        "ties and views its tensors as the one that was saved. Nothing was changed.");
  }
}

// Throws when what the checkpoint has for `live` cannot all be there at once. Costs nothing where no two names overlap.
inline void need_agreement(const State& saved, const State& live) {
  std::vector<Extent> together;
  std::uintptr_t end = 0;
  const auto close = [&] {
    if (together.size() > 1) need_agreement(saved, together);
    together.clear();
  };
  for (const Extent& one : extents_of(live)) {
    const bool apart =
        together.empty() || together.front().tensor->device() != one.tensor->device() || one.begin >= end;
    if (apart) close(), end = 0;
    together.push_back(one);
    end = std::max(end, one.end);
  }
  close();
}

}  // namespace frugal::inline v0::detail
