#pragma once

#include <c10/util/Exception.h>

#include <dlfcn.h>

#include <type_traits>
#include <utility>

namespace frugal::inline v0::detail {

// Compute capability by the CUDA driver's stable C interface, looked up at run time: no toolkit, no context, no memory
// on the device. The driver numbers devices as LibTorch does (both obey CUDA_VISIBLE_DEVICES). Not yet run on a GPU.
inline std::pair<int, int> compute_capability(int index) {
  constexpr const char* hint =
      " Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or pass a Capability that says what the device can do.";
  // Never closed: LibTorch holds the driver until the process ends.
  void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  TORCH_CHECK(driver != nullptr, "Capability: device cuda:", index, " cannot be asked, there is no CUDA driver here.",
              hint);
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(driver, name));
    TORCH_CHECK(function != nullptr, "Capability: the CUDA driver has no ", name, ".", hint);
  };
  int (*init)(unsigned) = nullptr;
  int (*get)(int*, int) = nullptr;
  int (*attribute)(int*, int, int) = nullptr;
  find("cuInit", init);
  find("cuDeviceGet", get);
  find("cuDeviceGetAttribute", attribute);

  constexpr int major_attribute = 75, minor_attribute = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
  int device = 0, major = 0, minor = 0;
  int error = init(0);
  if (error == 0) error = get(&device, index);
  if (error == 0) error = attribute(&major, major_attribute, device);
  if (error == 0) error = attribute(&minor, minor_attribute, device);
  TORCH_CHECK(error == 0 && major > 0, "Capability: the CUDA driver does not answer for cuda:", index, " (error ",
              error, ").", hint);
  return {major, minor};
}

}  // namespace frugal::inline v0::detail
