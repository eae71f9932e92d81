#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

// Where a fused kernel would be wrong. It walks parameter, gradient and state side by side in memory, as if each were
// one row of numbers, and (on a CPU) checks nothing: other strides give wrong numbers without a word.
namespace frugal::inline v0::detail {

// Whether equal indices lie at equal distances from the first element. The stride of a dimension of size 1 is never
// used; LibTorch does not normalise it.
inline bool same_order(const at::Tensor& one, const at::Tensor& other) {
  const at::IntArrayRef sizes = one.sizes(), others = other.sizes(), strides = one.strides(), theirs = other.strides();
  if (sizes.size() != others.size()) return false;
  for (std::size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != others[d] || (strides[d] != theirs[d] && sizes[d] > 1)) return false;
  return true;
}

// Whether two tensors are of one kind and lie alike. False says nothing: then it takes a closer look.
inline bool clearly_alike(const at::Tensor& one, const at::Tensor& other) {
  const c10::TensorImpl &a = *one.unsafeGetTensorImpl(), &b = *other.unsafeGetTensorImpl();
  return a.key_set() == b.key_set() && a.dtype() == b.dtype() && same_order(one, other) &&
         (a.is_cpu() || a.device() == b.device());
}

// Why no kernel can step this parameter with this gradient; null when one can.
inline const char* refusal(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (gradient.layout() != at::kStrided) return "a gradient is sparse";
  if (parameter.layout() != at::kStrided) return "a parameter is sparse";
  if (parameter.is_complex()) return "a parameter is complex";
  switch (parameter.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
      break;
    default:
      return "a parameter has a dtype that no kernel knows";
  }
  if (!parameter.is_cpu() && !parameter.is_cuda()) return "a parameter is on a device that has no such kernel";
  if (parameter.is_neg() || gradient.is_neg() || gradient._is_zerotensor()) return "a tensor is lazy";
  if (!parameter.is_non_overlapping_and_dense()) return "the memory of a parameter overlaps itself or has gaps";
  if (clearly_alike(parameter, gradient)) return nullptr;
  if (gradient.device() != parameter.device()) return "a parameter and its gradient are on different devices";
  if (gradient.scalar_type() != parameter.scalar_type()) return "a parameter and its gradient differ in dtype";
  if (!same_order(parameter, gradient)) return "a parameter and its gradient differ in strides";
  return nullptr;
}

// The same for one tensor of the parameter's state.
inline const char* state_refusal(const at::Tensor& parameter, const at::Tensor& state) {
  if (clearly_alike(parameter, state)) return nullptr;
  if (state.layout() != at::kStrided) return "the state of a parameter is sparse";
  if (state.device() != parameter.device()) return "a parameter and its state are on different devices";
  if (state.scalar_type() != parameter.scalar_type()) return "a parameter and its state differ in dtype";
  if (!same_order(parameter, state)) return "a parameter and its state differ in strides";
  return nullptr;
}

// The same numbers as one row, for tensors whose strides differ where it does not matter: CUDA's kernels compare them
// literally. `dense` says over how many elements. Costs an allocation, so it is for those tensors only.
inline at::Tensor as_row(const at::Tensor& dense) { return dense.as_strided({dense.numel()}, {1}); }

// Whether stretches of memory overlap: of parameters that are tied and listed twice, or are views. The kernels write all at
// once. Sorting is done anew only when something moved, came or went.
class SharedMemory {
 public:
  void begin() { seen_ = 0; }
  // For each of them, in order.
  void see(const void* memory, std::size_t bytes) {
    const auto* const first = static_cast<const std::byte*>(memory);
    const Range range{first, first + bytes};
    if (seen_ < ranges_.size() && ranges_[seen_] == range) return void(++seen_);
    ranges_.resize(seen_);
    ranges_.push_back(range);
    ++seen_;
    stale_ = true;
  }
  // After the last one.
  bool found() {
    if (seen_ != ranges_.size()) ranges_.resize(seen_), stale_ = true;
    if (!stale_) return found_;
    stale_ = false;
    sorted_ = ranges_;
    std::ranges::sort(sorted_, std::less<>{}, &Range::first);
    const auto overlap = [](const Range& left, const Range& right) { return std::less<>{}(right.first, left.last); };
    return found_ = std::ranges::adjacent_find(sorted_, overlap) != sorted_.end();
  }

 private:
  struct Range {
    const std::byte *first, *last;
    bool operator==(const Range&) const = default;
  };
  std::vector<Range> ranges_, sorted_;
  std::size_t seen_ = 0;
  bool stale_ = false, found_ = false;
};

}  // namespace frugal::inline v0::detail
