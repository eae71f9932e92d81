#pragma once

#include <frugal/detail/batch_search.hpp>
#include <frugal/detail/gradients.hpp>
#include <frugal/detail/module.hpp>
#include <frugal/detail/out_of_memory.hpp>
#include <frugal/detail/snapshot.hpp>
#include <frugal/policy.hpp>
#include <frugal/state_guard.hpp>
#include <frugal/update.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/_foreach_zero.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

namespace frugal::inline v0::detail {

// The peak of a device's allocator over a trial. On a CPU nothing is measured. Not yet run on a GPU.
class DeviceMeter {
 public:
  explicit DeviceMeter(std::optional<c10::Device> device) {
    c10::DeviceAllocator* const allocator = device && !device->is_cpu() ? device_allocator() : nullptr;
    if (!allocator) return;
    index_ = device->index();
    try {
      allocator->getMemoryInfo(index_);
      allocator_ = allocator;
    } catch (const c10::NotImplementedError&) {  // a device that cannot say how much there is
    }
  }
  bool measures() const { return allocator_ != nullptr; }
  void start() {
    if (allocator_) allocator_->resetPeakStats(index_);
  }
  std::optional<MemoryUse> read() const {
    if (!allocator_) return std::nullopt;
    constexpr auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto stats = allocator_->getDeviceStats(index_);
    const auto free = static_cast<double>(allocator_->getMemoryInfo(index_).first);
    return MemoryUse{.peak = static_cast<double>(stats.allocated_bytes[all].peak),
                     .capacity = free + static_cast<double>(stats.reserved_bytes[all].current)};
  }

 private:
  c10::DeviceAllocator* allocator_ = nullptr;
  c10::DeviceIndex index_ = 0;
};

// A precision policy that never overflows, and so neither skips nor complains of skips: the optimizer's state must exist,
// and a trial's numbers do not matter. Its gradients are zero before anybody looks at them.
template <class Precision>
struct NeverOverflowing {
  static constexpr Role role = Role::precision;
  Precision& precision;
  Gradients gradients = {};

  auto autocast() { return precision.autocast(); }
  decltype(auto) scale(auto&& loss) { return precision.scale(loss); }
  void unscale(auto& optimizer, double factor) {
    if constexpr (requires { optimizer.param_groups(); })
      gradients.each_kind(optimizer, [](std::vector<at::Tensor>& list) { at::_foreach_zero_(list); });
    precision.unscale(optimizer, factor);
  }
  bool step(auto& optimizer) {
    if (!precision.step(optimizer)) optimizer.step();  // whatever made it skip
    return true;
  }
};

// Gives a policy back the state that it had.
template <class Type>
class GuardedPolicy {
 public:
  explicit GuardedPolicy(Type& policy) : policy_(policy) {
    if constexpr (Stateful<Type>) policy.save(state_);
  }
  GuardedPolicy(const GuardedPolicy&) = delete;
  ~GuardedPolicy() {
    if constexpr (Stateful<Type>) {
      try {
        policy_.load(state_);
      } catch (...) {  // what it wrote itself it can read
      }
    }
  }

 private:
  Type& policy_;
  Snapshot state_;
};

// Trains on one batch of n samples as training will, and leaves no trace.
template <class Model, class Optimizer, class MakeBatch, class Loss>
class ModelTrial {
  static constexpr bool steps_alone = requires(Optimizer& optimizer) { optimizer.step(); };
  static_assert(steps_alone,
                "BatchSizeProber: an optimizer that needs a closure (LBFGS) evaluates the batch itself. Call "
                "plan(effective, trial) with a trial that makes one step.");

 public:
  ModelTrial(std::int64_t effective, Model& model, Optimizer& optimizer, MakeBatch& make_batch, Loss& loss)
      : effective_(effective),
        model_(model),
        optimizer_(optimizer),
        make_batch_(make_batch),
        loss_(loss),
        meter_(device_of(optimizer)) {}

  // Whether trials say what they use.
  bool measures() const { return meter_.measures(); }

  std::optional<MemoryUse> operator()(std::int64_t size) { return guarded(size); }
  std::optional<MemoryUse> operator()(std::int64_t size, auto& precision) {
    const GuardedPolicy state(precision);
    NeverOverflowing<std::remove_reference_t<decltype(precision)>> stepping{precision};
    return guarded(size, stepping);
  }

 private:
  static std::optional<c10::Device> device_of(auto& optimizer) {
    if constexpr (requires { optimizer.param_groups(); })
      for (auto& group : optimizer.param_groups())
        for (auto& parameter : group.params())
          if (parameter.defined()) return parameter.device();
    return std::nullopt;
  }

  std::optional<MemoryUse> guarded(std::int64_t size, auto&... precision) {
    StateGuard guard(model_, optimizer_);
    meter_.start();
    train(size, precision...);
    const auto use = meter_.read();
    guard.restore();  // here, where an error is seen
    return use;
  }

  // The first update creates the optimizer's state. Only then is memory as full as it will be: state beside
  // activations, and with accumulation the gradients of the micro-batch before.
  void train(std::int64_t size, auto&... precision) {
    if constexpr (requires { module_of(model_).train(); }) module_of(model_).train();
    auto batch = make_batch_(size);
    for (const int micro_batches : {1, size < effective_ ? 2 : 1}) {
      for (int i = 0; i < micro_batches; ++i) backpropagate(batch, size, precision...);
      if constexpr (steps_alone) update(optimizer_, precision...);
    }
  }

  auto evaluate(auto& batch) { return loss_(model_, batch); }
  auto evaluate(auto& batch, auto& precision) {
    [[maybe_unused]] auto region = precision.autocast();
    return loss_(model_, batch);
  }
  void backpropagate(auto& batch, std::int64_t size, auto&... precision) {
    auto value = evaluate(batch, precision...);
    constexpr bool weighted = requires { value.weight; };
    if constexpr (weighted) std::ignore = backward(value.loss, value.weight, precision...);
    else std::ignore = backward(value, static_cast<double>(size), precision...);
  }

  std::int64_t effective_;
  Model& model_;
  Optimizer& optimizer_;
  MakeBatch& make_batch_;
  Loss& loss_;
  DeviceMeter meter_;
};

}  // namespace frugal::inline v0::detail
