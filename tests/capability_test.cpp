#include "support/catch.hpp"

#include <frugal/capability.hpp>
#include <frugal/detail/device_kernels.hpp>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using frugal::Capability;
using frugal::Precision;

TEST_CASE("Capability: fp16 needs compute capability 7.0, bf16 and TF32 need 8.0") {
  const auto gpu = [](int major, int minor) { return Capability{.device = at::kCUDA, .major = major, .minor = minor}; };
  CHECK_FALSE(gpu(6, 1).supports(Precision::fp16));
  CHECK(gpu(7, 0).supports(Precision::fp16));
  CHECK_FALSE(gpu(7, 5).supports(Precision::bf16));
  CHECK_FALSE(gpu(7, 5).supports(Precision::tf32));
  CHECK(gpu(8, 0).supports(Precision::bf16));
  CHECK(gpu(8, 0).supports(Precision::tf32));
  CHECK(gpu(12, 0).supports(Precision::fp16));
  CHECK(gpu(3, 5).supports(Precision::fp32));
  CHECK(gpu(3, 5).supports(Precision::bit_exact));
  CHECK(gpu(7, 5).missing(Precision::bf16) == "compute capability 7.5 is below 8.0");

  CHECK(gpu(6, 1).best() == Precision::fp32);
  CHECK(gpu(7, 0).best() == Precision::fp16);
  CHECK(gpu(9, 0).best() == Precision::bf16);
}

TEST_CASE("Capability: a CPU needs hardware for bf16 and fp16, and has no TF32") {
  const Capability plain{at::kCPU};
  CHECK_FALSE(plain.supports(Precision::bf16));
  CHECK_FALSE(plain.supports(Precision::fp16));
  CHECK_FALSE(plain.supports(Precision::tf32));
  CHECK(plain.supports(Precision::fp32));
  CHECK(plain.supports(Precision::bit_exact));
  CHECK(plain.best() == Precision::fp32);
  CHECK(Capability{.device = at::kCPU, .cpu_bf16 = true}.best() == Precision::bf16);
  CHECK(Capability{.device = at::kCPU, .cpu_fp16 = true}.best() == Precision::fp32);  // never by itself
  CHECK(Capability{.device = at::kCPU, .cpu_fp16 = true}.supports(Precision::fp16));
  CHECK_FALSE(Capability{.device = at::kMPS, .major = 9}.supports(Precision::bf16));
}

#if defined(__x86_64__)
TEST_CASE("Capability: what cpuid says of this CPU is what the kernel says") {
  std::ifstream file("/proc/cpuinfo");
  std::string flags;
  while (std::getline(file, flags) && !flags.starts_with("flags")) {}
  const auto has = [&](const std::string& flag) { return (flags + ' ').find(' ' + flag + ' ') != std::string::npos; };
  REQUIRE(has("fpu"));
  const Capability here = Capability::of(at::kCPU);
  CHECK(here.device == at::kCPU);
  CHECK(here.cpu_bf16 == (has("avx512_bf16") || has("amx_bf16")));
  CHECK(here.cpu_fp16 == (has("avx512_fp16") || has("amx_fp16")));
}
#endif

TEST_CASE("Capability: a device that cannot be asked is an error, never a slow device") {
  CHECK_THROWS_WITH(Capability::of(at::kMeta), ContainsSubstring("meta") && ContainsSubstring("Pass a Capability"));
  if (std::filesystem::exists("/proc/driver/nvidia/version")) {
    CHECK(Capability::of(at::kCUDA).major >= 3);
    CHECK_THROWS_WITH(Capability::of(at::Device(at::kCUDA, 101)), ContainsSubstring("cuda:101"));
  } else {
    CHECK_THROWS_WITH(Capability::of(at::kCUDA), ContainsSubstring("CUDA driver") && ContainsSubstring("cuda:0"));
    CHECK_THROWS_WITH(Capability::of(at::Device(at::kCUDA, 3)), ContainsSubstring("cuda:3"));
  }
}

namespace {

using frugal::detail::KernelTrials;

const at::Device second_gpu(at::kCUDA, 1);
constexpr Capability maxwell{.device = at::kCUDA, .major = 5, .minor = 2};

// What a trial that fails with this text comes to, as LibTorch's exception and as any other.
std::string told(const std::string& text) {
  std::string last;
  for (const bool libtorch : {true, false}) {
    KernelTrials trials;
    std::string now;
    try {
      trials.need(second_gpu, maxwell, [&](at::Device) {
        TORCH_CHECK(!libtorch, text);
        throw std::runtime_error(text);
      });
    } catch (const c10::Error& error) { now = error.what_without_backtrace(); } catch (const std::exception& error) {
      now = error.what();
    }
    CHECK((last.empty() || now == last));
    last = now;
  }
  return last;
}

}  // namespace

TEST_CASE("Capability: a GPU that LibTorch has no kernels for is a configuration error") {
  for (const char* text :
       {"CUDA error: no kernel image is available for execution on the device\nSearch for "
        "`cudaErrorNoKernelImageForDevice' in https://docs.nvidia.com/cuda/ for more information.",
        "CUDA error: invalid device function",
        "CUDA error: CUBLAS_STATUS_ARCH_MISMATCH when calling cublasCreate(handle)",
        "cuDNN error: CUDNN_STATUS_ARCH_MISMATCH", "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH"})
    CHECK(told(text) ==
          "AmpPolicy: this LibTorch has no kernels for cuda:1, whose compute capability is 5.2. Install a LibTorch "
          "that was "
          "built for it (at::show_config() lists what this one was built for), or compute on the CPU.");
}

TEST_CASE("Capability: a program without LibTorch's CUDA part is a configuration error") {
  const std::string without_it =
      "AmpPolicy: this program has no LibTorch for cuda:1, whose compute capability is 5.2. Install a CUDA build of "
      "LibTorch and link it between --no-as-needed and --as-needed (torch_cuda, c10_cuda), or compute on the CPU.";
  CHECK(told("PyTorch is not linked with support for cuda devices") == without_it);
  if (c10::impl::hasDeviceGuardImpl(at::kCUDA)) return;
  KernelTrials trials;  // here is such a program
  CHECK_THROWS_WITH(trials.need(second_gpu, maxwell, frugal::detail::run_one_kernel), ContainsSubstring(without_it));
  CHECK_THROWS_WITH(frugal::detail::with_kernels(second_gpu, maxwell), ContainsSubstring(without_it));
  CHECK_THROWS_WITH(frugal::detail::with_kernels(at::kCUDA, maxwell), ContainsSubstring("no LibTorch for cuda, whose"));
}

TEST_CASE("Capability: any other error of the trial passes as it is") {
  KernelTrials trials;
  const auto need = [&](auto&& trial) { trials.need(second_gpu, maxwell, trial); };
  CHECK(told("CUDA error: out of memory") == "CUDA error: out of memory");
  CHECK(told("CUDA error: an illegal memory access was encountered") ==
        "CUDA error: an illegal memory access was encountered");
  CHECK_THROWS_AS(need([](at::Device) { throw std::bad_alloc(); }), std::bad_alloc);
  CHECK_THROWS_AS(need([](at::Device) { TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory"); }),
                  c10::OutOfMemoryError);
  CHECK_THROWS_AS(need([](at::Device) { throw 3; }), int);
}

TEST_CASE("Capability: a kernel is tried once per device, and again after a failure") {
  KernelTrials trials;
  std::vector<at::Device> tried;
  const auto good = [&](at::Device device) { tried.push_back(device); };
  const at::Device first_gpu(at::kCUDA, 0);
  CHECK_THROWS(trials.need(first_gpu, maxwell, [](at::Device) { throw std::runtime_error("busy"); }));
  for (int i = 0; i < 3; ++i) trials.need(first_gpu, maxwell, good), trials.need(second_gpu, maxwell, good);
  CHECK(tried == std::vector{first_gpu, second_gpu});

  KernelTrials shared;
  std::atomic<int> calls{0};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 8; ++i)
      threads.emplace_back([&] {
        shared.need(first_gpu, maxwell, [&](at::Device) {
          ++calls;
          std::this_thread::yield();
        });
      });
  }
  CHECK(calls == 1);
}

TEST_CASE("Capability: what computes is let through unchanged, and a CPU is never asked") {
  const Capability cpu = frugal::detail::with_kernels(at::kCPU, {.device = at::kCPU, .cpu_bf16 = true});
  CHECK(cpu.device == at::kCPU);
  CHECK(cpu.cpu_bf16);
  frugal::detail::run_one_kernel(at::kCPU);
  if (!std::filesystem::exists("/proc/driver/nvidia/version") || !c10::impl::hasDeviceGuardImpl(at::kCUDA)) return;
  const Capability here = Capability::of(at::kCUDA);
  CHECK(frugal::detail::with_kernels(at::kCUDA, here).major == here.major);
}
