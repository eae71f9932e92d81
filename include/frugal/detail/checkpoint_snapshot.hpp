#pragma once

#include <frugal/detail/safetensors.hpp>
#include <frugal/detail/state_archive.hpp>
#include <frugal/detail/tensor_types.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Between a State and a file.
namespace frugal::inline v0::detail {

// A copy of a State at one moment, in host memory that is kept for the next one: fresh pages cost ten times a warm copy.
// Costs the size of the state in memory. With a CUDA device the memory is pinned: not yet run on a GPU.
class CheckpointSnapshot {
 public:
  // When it returns, the tensors of `state` may change. Copies from a device run side by side; one sync per device.
  void take(const State& state) {
    document_ = {};
    document_.metadata = state.values;
    std::vector<std::size_t> places;
    const std::size_t size = arrange(state, places);
    bool pinned = false;
    for (const auto& [name, tensor] : state.tensors) pinned = pinned || tensor.is_cuda();
    if (!buffer_.defined() || static_cast<std::size_t>(buffer_.numel()) < size || (pinned && !buffer_.is_pinned())) {
      buffer_ = at::Tensor();  // before the larger one is there
      buffer_ = at::empty({static_cast<std::int64_t>(size)}, at::TensorOptions(at::kByte).pinned_memory(pinned));
    }
    const c10::NoGradGuard no_grad;
    std::vector<c10::Device> busy;
    std::size_t i = 0;
    for (const auto& [name, tensor] : state.tensors) {
      std::byte* const at = static_cast<std::byte*>(buffer_.mutable_data_ptr()) + places[i];
      document_.tensors[i++].bytes = {at, tensor.nbytes()};
      if (tensor.numel() > 0) copy(tensor, at, pinned, busy);
    }
    for (const c10::Device& device : busy) {
      const c10::impl::VirtualGuardImpl backend(device.type());
      backend.getStream(device).synchronize();
    }
  }

  // Refers to the memory of this snapshot.
  const Document& document() const { return document_; }

 private:
  static constexpr std::size_t alignment = 64;

  // The entries without their bytes, and where these go; returns how many there are.
  std::size_t arrange(const State& state, std::vector<std::size_t>& places) {
    std::size_t size = 0;
    for (const auto& [name, tensor] : state.tensors) {
      const auto type = name_of_type(tensor.scalar_type());
      TORCH_CHECK(type && tensor.layout() == at::kStrided, "CheckpointManager: '", name, "' is a ", tensor.layout(),
                  " ", tensor.scalar_type(),
                  " tensor, which the safetensors format cannot hold. Use a dense standard type.");
      document_.tensors.push_back({name, std::string(*type), tensor.sizes().vec(), {}});
      places.push_back(size);
      size += (tensor.nbytes() + alignment - 1) / alignment * alignment;
    }
    return size;
  }

  // Plain memory goes by memcpy: LibTorch's own copy uses the thread pool, which collapses when the cores are busy.
  static void copy(const at::Tensor& tensor, std::byte* to, bool pinned, std::vector<c10::Device>& busy) {
    if (tensor.numel() == 0) return;  // it may have no memory to point to
    if (tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
      std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
      return;
    }
    at::from_blob(to, tensor.sizes(), at::TensorOptions(tensor.scalar_type())).copy_(tensor, /*non_blocking=*/pinned);
    if (!tensor.is_cpu() && std::ranges::find(busy, tensor.device()) == busy.end()) busy.push_back(tensor.device());
  }

  Document document_;
  at::Tensor buffer_;
};

// Reads the values and those tensors whose name `wanted` accepts, and checks their hashes. Throws DamagedFile.
inline State read_state(const DocumentReader& reader, const std::function<bool(std::string_view)>& wanted) {
  State state;
  state.values = reader.metadata();
  for (const StoredTensor& entry : reader.entries()) {
    if (!wanted(entry.name)) continue;
    const auto type = type_of_name(entry.dtype);
    if (!type) throw DamagedFile("'" + entry.name + "' has the unknown type " + entry.dtype + ".");
    at::Tensor tensor = at::empty(entry.shape, at::TensorOptions(*type));
    reader.read(entry.name, {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()});
    state.tensors.emplace(entry.name, std::move(tensor));
  }
  return state;
}

}  // namespace frugal::inline v0::detail
