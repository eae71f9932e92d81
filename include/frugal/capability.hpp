#pragma once

#include <frugal/detail/cpu_features.hpp>
#include <frugal/detail/cuda_driver.hpp>

#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <string>
#include <string_view>

/// What a device can do, as a value, and which precision that allows.
///
///     frugal::Capability gpu = frugal::Capability::of(at::kCUDA);
///     if (gpu.supports(frugal::Precision::bf16)) ...
///     frugal::Capability t4{.device = at::kCUDA, .major = 7, .minor = 5};   // hardware that is not here
namespace frugal::inline v0 {

/// How a model computes. `tf32`: float32 tensors, matrix products and convolutions rounded to TF32 (10 bits of
/// mantissa). `bf16`, `fp16`: autocast; fp16 with loss scaling. `bit_exact`: float32 with deterministic kernels, TF32
/// off.
enum class Precision { fp32, tf32, bf16, fp16, bit_exact };

/// The precision's name, as FRUGAL_PRECISION and checkpoints spell it.
constexpr std::string_view name_of(Precision precision) {
  constexpr std::string_view names[] = {"fp32", "tf32", "bf16", "fp16", "bit_exact"};
  return names[static_cast<int>(precision)];
}

/// What a device can do. An aggregate: write one by hand to plan for hardware that is not here.
struct Capability {
  at::DeviceType device;  ///< what kind of device this describes
  int major = 0;          ///< CUDA compute capability, 8.0 is {8, 0}
  int minor = 0;
  bool cpu_bf16 = false;  ///< a CPU with AVX512-BF16 or AMX-BF16 (Arm: BF16)
  bool cpu_fp16 = false;  ///< a CPU with AVX512-FP16 or AMX-FP16 (Arm: half-precision Advanced SIMD)

  /// Asks the hardware. A CUDA device without an index is the current one. Works without a CUDA toolkit and creates no
  /// CUDA context. Throws when the device cannot be asked (no driver, no such device, a kind other than CPU and CUDA):
  /// an unknown device is never taken for a slow one.
  static Capability of(at::Device device);

  /// Why the device does not compute in `precision` with hardware of its own; empty when it does. fp16 needs compute
  /// capability 7.0, bf16 and TF32 need 8.0; see `cpu_bf16` and `cpu_fp16` for CPUs.
  std::string missing(Precision precision) const;
  /// Whether the device computes in `precision` with hardware of its own.
  bool supports(Precision precision) const { return missing(precision).empty(); }
  /// What `Auto` becomes: bf16 where the hardware has it, else fp16 on a GPU that has it, else fp32. Never TF32, and
  /// never fp16 on a CPU.
  Precision best() const {
    if (supports(Precision::bf16)) return Precision::bf16;
    return device != at::kCPU && supports(Precision::fp16) ? Precision::fp16 : Precision::fp32;
  }
};

inline Capability Capability::of(at::Device device) {
  Capability found{.device = device.type()};
  if (device.is_cpu()) {
    const detail::CpuFeatures features = detail::cpu_features();
    found.cpu_bf16 = features.bf16;
    found.cpu_fp16 = features.fp16;
    return found;
  }
  TORCH_CHECK(device.is_cuda(), "Capability: what a ", device.type(),
              " device can do is not known. Pass a Capability, or "
              "choose a precision in code that needs none.");
  int index = device.index();
  if (!device.has_index()) {
    index = 0;
    if (c10::impl::hasDeviceGuardImpl(at::kCUDA)) {
      const auto* cuda = c10::impl::getDeviceGuardImpl(at::kCUDA);
      if (cuda->deviceCount() > 0) index = cuda->getDevice().index();  // without devices: the driver says why
    }
  }
  const auto [major, minor] = detail::compute_capability(index);
  found.major = major;
  found.minor = minor;
  return found;
}

inline std::string Capability::missing(Precision precision) const {
  const auto below = [&](int needed) -> std::string {
    if (device == at::kCUDA && major >= needed) return {};
    if (device != at::kCUDA) return "whether this kind of device has it is not known";
    return "compute capability " + std::to_string(major) + "." + std::to_string(minor) + " is below " +
           std::to_string(needed) + ".0";
  };
  const bool cpu = device == at::kCPU;
  switch (precision) {
    case Precision::bf16:
      if (cpu) return cpu_bf16 ? "" : "this CPU has neither AVX512-BF16 nor AMX-BF16";
      return below(8);
    case Precision::fp16:
      if (cpu) return cpu_fp16 ? "" : "this CPU has neither AVX512-FP16 nor AMX-FP16";
      return below(7);
    case Precision::tf32:
      return cpu ? "a CPU has no TF32" : below(8);
    case Precision::fp32:
    case Precision::bit_exact:
      break;
  }
  return {};
}

}  // namespace frugal::inline v0
