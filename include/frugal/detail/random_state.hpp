#pragma once

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Device.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// The state of the default generators at one moment: the CPU's, and those of all CUDA devices that this process uses (not
// yet run on a GPU). Some kilobytes in host memory; no device sync.
class RandomState {
 public:
  // Of no moment: restore() does nothing.
  RandomState() = default;

  static RandomState now() {
    RandomState state;
    for (const at::Device& device : devices_in_use()) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::scoped_lock lock(generator.mutex());
      state.states_.emplace_back(device, generator.get_state());
    }
    return state;
  }
  void restore() const {
    for (const auto& [device, saved] : states_) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::scoped_lock lock(generator.mutex());
      generator.set_state(saved);
    }
  }
  // Throws what restore() would throw, and changes nothing.
  void check() const {
    for (const auto& [device, saved] : states_) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::scoped_lock lock(generator.mutex());
      generator.clone().set_state(saved);
    }
  }

  // "random.cpu", "random.cuda:0".
  void save(auto& out) const {
    for (const auto& [device, saved] : states_) out.write("random." + device.str(), saved);
  }
  // A device that is not in use here is left out, and one that is not in the file keeps its generator.
  void load(auto& in) {
    std::vector<std::pair<at::Device, at::Tensor>> states;
    for (const at::Device& device : devices_in_use()) {
      const std::string name = "random." + device.str();
      if (!in.has(name)) continue;
      at::Tensor saved;
      in.read(name, saved);
      states.emplace_back(device, std::move(saved));
    }
    states_ = std::move(states);
  }

 private:
  static std::vector<at::Device> devices_in_use() {
    std::vector<at::Device> devices{at::Device(at::kCPU)};
    if (!at::globalContext().hasCUDA()) return devices;
    const auto& hooks = at::detail::getCUDAHooks();
    for (int i = 0; i < hooks.deviceCount(); ++i)
      if (const auto index = static_cast<at::DeviceIndex>(i); hooks.hasPrimaryContext(index))
        devices.emplace_back(at::kCUDA, index);
    return devices;
  }

  std::vector<std::pair<at::Device, at::Tensor>> states_;
};

}  // namespace frugal::inline v0::detail
