#include "support/catch.hpp"

#include <frugal/capability.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

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
