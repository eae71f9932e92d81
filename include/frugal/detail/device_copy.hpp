#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/StreamGuard.h>

#include <concepts>
#include <optional>
#include <ranges>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

// Takes a batch of any type to a device, one batch ahead of its use where the device allows that.
namespace frugal::inline v0::detail {

// A batch that knows how to go to a device: LibTorch's PackedSequence, or a user's own struct.
template <class Type>
concept MovesItself = requires(Type& batch, at::Device device) { batch.to(device); };

// A range whose elements can be visited in place; neither text, nor a path that consists of paths.
template <class Type>
concept RangeOfParts =
    std::ranges::range<Type> && !std::convertible_to<Type, std::string_view> &&
    std::is_lvalue_reference_v<std::ranges::range_reference_t<Type>> &&
    !std::same_as<std::remove_cvref_t<std::ranges::range_reference_t<Type>>, std::remove_cvref_t<Type>>;

// Calls on_tensor(tensor) for every defined tensor in a pair, tuple, range, optional, Example<> or Batch, and
// on_other(part) for every part that moves itself. The rest of a batch is left alone.
void visit_parts(auto& batch, auto& on_tensor, auto& on_other) {
  using Type = std::remove_reference_t<decltype(batch)>;
  const auto into = [&](auto&... parts) { (visit_parts(parts, on_tensor, on_other), ...); };
  if constexpr (std::is_const_v<Type>) return;  // the key of a map
  else if constexpr (std::same_as<Type, at::Tensor>) {
    if (batch.defined()) on_tensor(batch);
  } else if constexpr (MovesItself<Type>) on_other(batch);
  else if constexpr (requires { std::tuple_size<Type>::value; }) std::apply(into, batch);
  else if constexpr (RangeOfParts<Type>) {
    for (auto& part : batch) into(part);
  } else if constexpr (requires {
                         batch.has_value();
                         *batch;
                       }) {
    if (batch.has_value()) into(*batch);
  } else if constexpr (requires {
                         batch.inputs;
                         batch.targets;
                       })
    into(batch.inputs, batch.targets);
  else if constexpr (requires {
                       batch.data;
                       batch.target;
                     })
    into(batch.data, batch.target);
  else if constexpr (requires { batch.data; }) into(batch.data);
}

// Copies to this kind of device can run beside its computations.
inline bool has_copy_engine(at::Device device) { return device.is_cuda(); }

// Moves the tensors of a batch on the CPU to pinned memory, where a device can fetch them without the CPU.
void pin(auto& batch) {
  const auto pinned = [](at::Tensor& part) {
    if (part.device().is_cpu() && part.layout() == at::kStrided) part = part.pin_memory();
  };
  const auto left = [](auto&) {};
  visit_parts(batch, pinned, left);
}

// One batch on its way. On a CUDA device (not yet run on a GPU) the copies run on a stream of their own:
//  - finish() makes the caller's stream wait for them, not the CPU;
//  - the pinned source may be dropped at once: LibTorch's host allocator reuses its memory after the copy;
//  - the copy belongs to the side stream, so the allocator is told that the caller's stream uses it: without that its
//    memory could be handed to a later copy while kernels that were only queued still have to read it.
template <class Item>
class DeviceCopy {
 public:
  explicit DeviceCopy(at::Device device) : device_(device) {
    if (!has_copy_engine(device)) return;
    const c10::impl::VirtualGuardImpl backend(device.type());
    if (!device.has_index()) device_ = backend.getDevice();
    side_ = backend.getStreamFromGlobalPool(device_, /*isHighPriority=*/false);
    copied_.emplace(device.type());
  }

  bool under_way() const { return batch_.has_value(); }

  void start(Item batch) {
    const auto move_tensor = [this](at::Tensor& part) { move(part); };
    const auto move_other = [this](auto& part) {
      if constexpr (std::is_assignable_v<decltype(part), decltype(part.to(device_))>) part = part.to(device_);
      else part.to(device_);
    };
    visit_parts(batch, move_tensor, move_other);
    if (side_) copied_->record(*side_);
    batch_.emplace(std::move(batch));
  }

  // The batch, for the caller's current stream.
  Item finish() {
    Item batch = std::move(*batch_);
    batch_.reset();
    if (side_) {
      const c10::Stream user = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
      copied_->block(user);
      const auto used = [&](at::Tensor& part) {
        if (part.device() == device_ && part.layout() == at::kStrided) part.record_stream(user);
      };
      const auto left = [](auto&) {};
      visit_parts(batch, used, left);
    }
    return batch;
  }

 private:
  void move(at::Tensor& part) const {
    if (part.device() == device_) return;
    const bool beside = side_ && part.device().is_cpu() && part.layout() == at::kStrided;
    const c10::OptionalStreamGuard guard(beside ? side_ : std::nullopt);
    // a copy to the CPU is used at once, so it must be complete
    part = part.to(device_, /*non_blocking=*/!device_.is_cpu());
  }

  at::Device device_;
  std::optional<c10::Stream> side_;
  std::optional<c10::Event> copied_;
  std::optional<Item> batch_;
};

}  // namespace frugal::inline v0::detail
