#pragma once

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>
#include <string_view>

namespace frugal::inline v0::detail {

// How running out of memory looks, by type and by text. Only devices have a type for it; a CPU allocator, cuBLAS, cuDNN
// and drivers throw plain errors.
inline bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) || dynamic_cast<const c10::OutOfMemoryError*>(&error)) return true;
  static constexpr std::string_view texts[] = {
      "out of memory",           // CUDA, HIP, XPU, drivers
      "can't allocate memory",   // DefaultCPUAllocator
      "not enough memory",       // DefaultCPUAllocator on some systems
      "Cannot allocate memory",  // the system: ENOMEM
      "std::bad_alloc",          // rethrown by a wrapper
      "CUBLAS_STATUS_ALLOC_FAILED",
      "CUDNN_STATUS_ALLOC_FAILED",
      "CUSOLVER_STATUS_ALLOC_FAILED",
      "CUFFT_ALLOC_FAILED",
      "cudaErrorMemoryAllocation",
      "unable to find an engine to execute this computation",  // cuDNN, when no workspace fits
  };
  const auto* const libtorch = dynamic_cast<const c10::Error*>(&error);
  // without the backtrace, in which anything may stand
  const std::string_view text = libtorch ? libtorch->what_without_backtrace() : error.what();
  return std::ranges::any_of(texts, [&](std::string_view known) { return text.find(known) != text.npos; });
}

// The allocator of the accelerator; null on a machine without one, and before its first use.
inline c10::DeviceAllocator* device_allocator() {
  const auto accelerator = at::getAccelerator();
  if (!accelerator || at::accelerator::deviceCount() == 0) return nullptr;
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(*accelerator));
  return allocator && allocator->initialized() ? allocator : nullptr;
}

}  // namespace frugal::inline v0::detail
