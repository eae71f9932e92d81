#pragma once

#include <frugal/detail/numeric_switches.hpp>

#include <c10/util/Exception.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

namespace frugal::inline v0::detail {

enum class NumericMode { tf32, bit_exact };

// One owner's share in a process-wide numeric mode. The first owner notes LibTorch's switches and sets them, the last
// one restores what the first one found; the two modes contradict each other, so only one is in force at a time.
// LibTorch reads its switches without a lock: begin and end a mode while no other thread computes.
class NumericShare {
 public:
  NumericShare() = default;
  explicit NumericShare(NumericMode mode) {
    Shared& process = shared();
    const std::lock_guard lock(process.mutex);
    TORCH_CHECK(process.owners == 0 || process.mode == mode, "AmpPolicy: ", name(mode), " and ", name(process.mode),
                " contradict each other, and both hold for the whole process. Destroy the other policy first.");
    if (process.owners == 0) {
      process.mode = mode;
      process.float32.emplace(mode == NumericMode::tf32);
      if (mode == NumericMode::bit_exact) process.determinism.emplace();
    }
    ++process.owners;
    held_ = true;
  }
  NumericShare(NumericShare&& other) noexcept : held_(std::exchange(other.held_, false)) {}
  NumericShare& operator=(NumericShare&& other) noexcept {
    std::swap(held_, other.held_);
    return *this;
  }
  ~NumericShare() {
    if (!held_) return;
    Shared& process = shared();
    const std::lock_guard lock(process.mutex);
    if (--process.owners > 0) return;
    if (process.determinism) std::exchange(process.determinism, std::nullopt)->restore();
    std::exchange(process.float32, std::nullopt)->restore();
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::int64_t owners = 0;
    NumericMode mode = NumericMode::tf32;
    std::optional<Float32Switches> float32;
    std::optional<DeterminismSwitches> determinism;
  };
  static Shared& shared() {
    static Shared process;
    return process;
  }
  static const char* name(NumericMode mode) { return mode == NumericMode::tf32 ? "TF32" : "bit-exact"; }

  bool held_ = false;
};

}  // namespace frugal::inline v0::detail
