#pragma once

#include <frugal/capability.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <string_view>
#include <vector>

// A GPU that LibTorch was not built for. It is there, it has memory, it says what it can do; only the first kernel fails, in
// the middle of a forward pass and with an error that names neither the cause nor the remedy.
namespace frugal::inline v0::detail {

// What an error says about the kernels of this build. none: there are some, but none for this GPU. no_backend: there is
// no CUDA in this LibTorch, or the linker has left it out.
enum class KernelProblem { other, none, no_backend };

inline KernelProblem kernel_problem(const std::exception& error) {
  static constexpr std::string_view without_kernels[] = {
      "no kernel image is available",  // cudaErrorNoKernelImageForDevice
      "invalid device function",       // cudaErrorInvalidDeviceFunction: a kernel that was compiled for other GPUs only
      "ARCH_MISMATCH",                 // CUBLAS_STATUS_, CUDNN_STATUS_, CUSOLVER_STATUS_, CUSPARSE_STATUS_
  };
  static constexpr std::string_view without_backend[] = {
      "from the 'CUDA' backend",                  // the dispatcher, for the first operator
      "not linked with support for cuda",         // c10's device guard
      "Torch not compiled with CUDA enabled",     // the hooks of a CPU build
      "Cannot initialize CUDA without ATen_cuda"  // the same, when the library was not loaded
  };
  const auto* const libtorch = dynamic_cast<const c10::Error*>(&error);
  // without the backtrace, in which anything may stand
  const std::string_view text = libtorch ? libtorch->what_without_backtrace() : error.what();
  const auto known = [&](std::string_view one) { return text.find(one) != text.npos; };
  if (std::ranges::any_of(without_kernels, known)) return KernelProblem::none;
  return std::ranges::any_of(without_backend, known) ? KernelProblem::no_backend : KernelProblem::other;
}

// Runs one kernel and waits for it: a kernel that is missing may show when it is launched or later. In a process that
// has not used the GPU yet this makes LibTorch's context there, as the first tensor would. Not yet run on a GPU.
inline void run_one_kernel(at::Device device) {
  at::empty({1}, at::TensorOptions(at::kFloat).device(device)).fill_(1.0).to(at::kCPU);
}

// Which devices have run a kernel. Safe from any thread; one trial at a time.
class KernelTrials {
 public:
  // Calls trial(device) unless it once succeeded there. Throws when the error says that this LibTorch has no kernels for
  // the device, whose capability goes into the text; any other error passes as it is. Either way the next call tries again.
  void need(at::Device device, const Capability& capability, auto&& trial) {
    const std::lock_guard lock(mutex_);
    if (std::ranges::find(good_, device) != good_.end()) return;
    try {
      trial(device);
    } catch (const std::exception& error) {
      const KernelProblem problem = kernel_problem(error);
      TORCH_CHECK(
          problem != KernelProblem::none, "AmpPolicy: this LibTorch has no kernels for ", device,
          ", whose compute capability is ", capability.major, ".", capability.minor,
          ". Install a LibTorch that was built for it (at::show_config() lists what this one was built for), or "
          "compute on the CPU.");
      TORCH_CHECK(problem != KernelProblem::no_backend, "AmpPolicy: this program has no LibTorch for ", device,
                  ", whose compute capability is ", capability.major, ".", capability.minor,
                  ". Install a CUDA build of LibTorch and link it between --no-as-needed and --as-needed (torch_cuda, "
                  "c10_cuda), or compute on the CPU.");
      throw;
    }
    good_.push_back(device);
  }

 private:
  std::mutex mutex_;
  std::vector<at::Device> good_;
};

// `capability` as it is, of a device that computes: on CUDA one kernel is run, once per process and device. Throws what
// KernelTrials::need does.
inline Capability with_kernels(at::Device device, Capability capability) {
  if (!device.is_cuda()) return capability;
  static KernelTrials trials;
  if (!device.has_index() && c10::impl::hasDeviceGuardImpl(at::kCUDA))
    device = c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice();
  trials.need(device, capability, run_one_kernel);
  return capability;
}

}  // namespace frugal::inline v0::detail
