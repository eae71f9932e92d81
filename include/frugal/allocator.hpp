#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string_view>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

/// glibc's malloc for training on a CPU: what a step frees stays in the process, and the next step computes in it.
///
///     int main() {
///       frugal::tune_allocator();        // first thing: before the first big tensor, before other threads
///       ...
///
/// Without it, malloc takes every large block from the system when it is allocated and gives it back when it is freed:
/// from 128 KB on at first, and from 32 MB on whatever the program does. So each step pays for the activations and the
/// gradients of a big model once more, one page fault and one cleared page per 4 KB, and the cores wait for the kernel.
///
/// Opt-in, since it acts on the whole process, and for good: malloc does not tell its settings, so nobody can put them
/// back. It sets three (mallopt(3)): M_MMAP_THRESHOLD, where that is refused M_MMAP_MAX, so that blocks below 2 GB come
/// from the heap; M_TRIM_THRESHOLD, so that the end of the heap is never given back; M_TOP_PAD, so that the heap grows by
/// 64 MB at once. What the user set in the environment wins: MALLOC_MMAP_THRESHOLD_, MALLOC_MMAP_MAX_,
/// MALLOC_TRIM_THRESHOLD_, MALLOC_TOP_PAD_, and the same in GLIBC_TUNABLES. What the program itself set by mallopt before
/// is overwritten.
///
/// The price is memory. The process keeps its peak: `top` and the limit of a container go on counting what was freed. And
/// the peak is higher: holes between blocks are kept too, and an aligned block, as LibTorch's are, does not always fit
/// into the hole that one of its size left. Resident memory settles within the first steps, well above what the tensors
/// need and, where few are large, at several times that. So not where memory is scarce. malloc_trim(0) gives the free
/// pages back when it is called, after a phase that needed much, and the next step pays for them again. It does nothing
/// for memory on a device.
namespace frugal::inline v0 {

/// What becomes of large blocks of memory from now on.
enum class AllocatorTuning {
  effective,   ///< what is freed stays in the process: by this call, or it did already
  overruled,   ///< it goes back to the system, since the environment sets a threshold; that one was left alone
  unavailable  ///< not glibc's malloc (musl, jemalloc, a sanitizer, another system), or it refuses: nothing has changed
};

/// "effective", "overruled by the environment" or "unavailable".
constexpr const char* to_string(AllocatorTuning tuning) {
  constexpr const char* words[] = {"effective", "overruled by the environment", "unavailable"};
  return words[static_cast<int>(tuning)];
}

namespace detail {

#if defined(__GLIBC__)

// Larger than what malloc, left alone, ever keeps: DEFAULT_MMAP_THRESHOLD_MAX, 32 MB.
inline constexpr std::uint32_t large_block = 40U << 20;

// In bytes, modulo 2^32 (older versions count in int): blocks in use of the heap, blocks that are mappings of their own,
// the size of the heap.
struct HeldMemory { std::uint32_t blocks, mapped, heap; };
inline HeldMemory held_memory() {
#if __GLIBC_PREREQ(2, 33)
  const auto now = ::mallinfo2();
#else
  const auto now = ::mallinfo();
#endif
  return {static_cast<std::uint32_t>(now.uordblks), static_cast<std::uint32_t>(now.hblkhd),
          static_cast<std::uint32_t>(now.arena)};
}

// unseen: another allocator served it. mapped: straight from the system. trimmed: from the heap, which shrank afterwards.
enum class BlockFate { unseen, mapped, trimmed, kept };

// What malloc does with a large block. Its pages are not touched: this costs a few system calls and no memory.
inline BlockFate fate_of_large_block() {
  const auto a_block_more = [](std::uint32_t before, std::uint32_t after) {
    return after - before > large_block / 2 && after - before < 2 * large_block;
  };
  const HeldMemory before = held_memory();
  void* volatile block = std::malloc(large_block);  // volatile: compilers remove a block that nobody uses
  const HeldMemory held = held_memory();
  std::free(block);
  if (a_block_more(before.mapped, held.mapped)) return BlockFate::mapped;
  if (!a_block_more(before.blocks, held.blocks)) return BlockFate::unseen;
  return a_block_more(held_memory().heap, held.heap) ? BlockFate::trimmed : BlockFate::kept;
}

// Whether the user says what a setting of malloc is: by its own variable, or as glibc.malloc.<name> in GLIBC_TUNABLES.
inline bool in_environment(const char* variable, std::string_view tunable) {
  if (const char* const value = std::getenv(variable); value && *value) return true;
  const char* const tunables = std::getenv("GLIBC_TUNABLES");
  return tunables && std::string_view(tunables).find(tunable) != std::string_view::npos;
}

// A refusal is not an error: what counts is what a large block does afterwards.
inline void set_malloc_thresholds(bool mapping, bool trimming, bool padding) {
  constexpr int no_limit = -1;  // as an unsigned size: the largest
  if (mapping && ::mallopt(M_MMAP_THRESHOLD, std::numeric_limits<int>::max()) == 0)
    ::mallopt(M_MMAP_MAX, 0);  // older versions take no threshold above 32 MB: no mappings at all
  if (trimming) ::mallopt(M_TRIM_THRESHOLD, no_limit);
  if (padding) ::mallopt(M_TOP_PAD, 64 << 20);
}

#endif

}  // namespace detail

/// Lets the process keep the memory that it frees; see the top of this header for what that costs. Says what was
/// achieved, by malloc's own counters. Call it once at the start of main; again, it does the same again. No other thread
/// should allocate meanwhile.
inline AllocatorTuning tune_allocator() {
#if defined(__GLIBC__)
  using detail::BlockFate, detail::in_environment;
  if (detail::fate_of_large_block() == BlockFate::unseen) return AllocatorTuning::unavailable;
  const bool maps = in_environment("MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold=") ||
                    in_environment("MALLOC_MMAP_MAX_", "glibc.malloc.mmap_max=");
  const bool trims = in_environment("MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold=");
  const bool pads = in_environment("MALLOC_TOP_PAD_", "glibc.malloc.top_pad=");
  detail::set_malloc_thresholds(!maps, !trims, !pads);
  if (detail::fate_of_large_block() == BlockFate::kept) return AllocatorTuning::effective;
  return maps || trims ? AllocatorTuning::overruled : AllocatorTuning::unavailable;
#else
  return AllocatorTuning::unavailable;
#endif
}

}  // namespace frugal::inline v0
