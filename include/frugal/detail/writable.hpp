#pragma once

#include <c10/core/InferenceMode.h>
#include <c10/core/Layout.h>

#include <cstdint>
#include <cstring>
#include <optional>

// Writing into tensors that LibTorch's copy_ refuses, and saying beforehand which ones nobody can write. Templates, so that
// the Trainer's headers do without tensors.
namespace frugal::inline v0::detail {

// An expanded tensor has one number for many elements; LibTorch refuses to write all of them. `tensor` without the
// repetitions of `live`, which has its shape.
template <class Tensor>
Tensor without_repetitions(Tensor tensor, const Tensor& live) {
  if (live.layout() != c10::kStrided) return tensor;
  for (std::int64_t d = 0; d < live.dim(); ++d)
    if (live.stride(d) == 0 && live.size(d) > 1) tensor = tensor.narrow(d, 0, 1);
  return tensor;
}

// Writes values into a tensor, whatever its strides. Needs NoGradGuard. Ask not_writable() first.
template <class Tensor>
void write_values(const Tensor& live, const Tensor& values) {
  std::optional<c10::InferenceMode> inference;  // what was made in this mode is written in it only
  if (live.is_inference()) inference.emplace();
  without_repetitions(live, live)
      .copy_(without_repetitions(values, live));  // detach() of a sparse one is another tensor
}

// Why a tensor cannot take these values, of its shape and in host memory, in words that follow its name; null: it can.
// Costs nothing but for elements that share memory: then a copy.
template <class Tensor>
const char* not_writable(const Tensor& live, const Tensor& values) {
  if (live.is_meta()) return "is on the meta device and has no memory";
  if (live._is_zerotensor()) return "is a zero tensor, which nobody can write";
  if (live.layout() != values.layout()) return "has another layout";
  if (live.layout() != c10::kStrided || live.numel() == 0 || live.is_non_overlapping_and_dense()) return nullptr;
  const Tensor trial = values.new_empty_strided(live.sizes(), live.strides());
  write_values(trial, values);
  const Tensor back = trial.contiguous(), expected = values.contiguous();
  if (std::memcmp(back.const_data_ptr(), expected.const_data_ptr(), expected.nbytes()) == 0) return nullptr;
  return "has one number in memory for several elements (expand, unfold), which differ there";
}

}  // namespace frugal::inline v0::detail
