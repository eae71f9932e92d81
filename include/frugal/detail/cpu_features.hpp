#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace frugal::inline v0::detail {

// Low-precision arithmetic that this CPU does in hardware and the operating system has switched on.
struct CpuFeatures {
  bool bf16 = false;
  bool fp16 = false;
};

#if defined(__x86_64__)

// Register state that the operating system saves; an instruction without it traps whatever cpuid says.
inline std::uint64_t saved_register_state() {
  std::uint32_t a = 0, b = 0, c = 0, d = 0;
  constexpr std::uint32_t osxsave = 1U << 27;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & osxsave)) return 0;
  std::uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (std::uint64_t{high} << 32) | low;
}

// Bits from the Intel Architecture Instruction Set Extensions reference, leaf 7. Read raw: older compilers have no
// names for these features. AMX also wants arch_prctl, which oneDNN asks for itself before its first tile.
inline CpuFeatures cpu_features() {
  const std::uint64_t state = saved_register_state();
  constexpr std::uint64_t avx512_state = 0xE6, amx_state = 0x60000;
  std::uint32_t a0 = 0, b0 = 0, c0 = 0, d0 = 0, a1 = 0, b1 = 0, c1 = 0, d1 = 0;
  if (!__get_cpuid_count(7, 0, &a0, &b0, &c0, &d0)) return {};
  if (a0 >= 1 && !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) return {};
  const auto bit = [](std::uint32_t word, int index) { return ((word >> index) & 1U) != 0; };
  const bool avx512 = (state & avx512_state) == avx512_state && bit(b0, 16);
  const bool amx = (state & amx_state) == amx_state && bit(d0, 24);
  return {.bf16 = (avx512 && bit(a1, 5)) || (amx && bit(d0, 22)),
          .fp16 = (avx512 && bit(d0, 23)) || (amx && bit(a1, 21))};
}

#elif defined(__aarch64__) && defined(__linux__)

// HWCAP2_BF16 and HWCAP_ASIMDHP of the Linux kernel's arm64 hwcap page. Not yet run on an Arm machine.
inline CpuFeatures cpu_features() {
  return {.bf16 = ((::getauxval(AT_HWCAP2) >> 14) & 1UL) != 0, .fp16 = ((::getauxval(AT_HWCAP) >> 10) & 1UL) != 0};
}

#else

inline CpuFeatures cpu_features() { return {}; }

#endif

}  // namespace frugal::inline v0::detail
