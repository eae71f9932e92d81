#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>

// Which samples a micro-batch holds: an order of the samples, and a partition of that order. Both are pure functions,
// the same on every platform and with every library version, because a checkpoint holds a position in them.
namespace frugal::inline v0::detail {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of the input changes half of the output's.
constexpr std::uint64_t mixed(std::uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  return bits ^ (bits >> 31);
}

// SplitMix64.
class Random {
 public:
  constexpr explicit Random(std::uint64_t state) : state_(state) {}
  constexpr std::uint64_t next() { return mixed(state_ += golden); }
  // Uniform in [0, bound): draws of the fewest bits that hold it are repeated until one fits, so nothing is favoured.
  constexpr std::uint64_t below(std::uint64_t bound) {
    const std::uint64_t mask = ~std::uint64_t{0} >> std::countl_zero((bound - 1) | 1);
    for (;;)
      if (const std::uint64_t drawn = next() & mask; drawn < bound) return drawn;
  }
  static constexpr std::uint64_t golden = 0x9E3779B97F4A7C15u;

 private:
  std::uint64_t state_;
};

// A number for (seed, epoch), and for a place in that epoch. Hashed one after the other: (0, 1) is not (1, 0).
constexpr std::uint64_t seed_of(std::uint64_t seed, std::int64_t epoch) {
  return mixed(mixed(seed + Random::golden) + static_cast<std::uint64_t>(epoch) * Random::golden);
}
constexpr std::uint64_t seed_of(std::uint64_t seed, std::int64_t epoch, std::int64_t first) {
  return seed_of(~seed_of(seed, epoch), first);
}

// Fisher-Yates: every order of the samples is as likely as any other.
inline void shuffle_samples(std::span<std::int64_t> order, std::uint64_t seed, std::int64_t epoch) {
  std::iota(order.begin(), order.end(), std::int64_t{0});
  Random random(seed_of(seed, epoch));
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
}

// Cuts an order of samples into effective batches, and those into micro-batches.
struct Partition {
  std::int64_t samples, batch_size, micro_batch;

  struct Part { std::int64_t first, count; };

  // Micro-batches of a whole effective batch.
  constexpr std::int64_t steps() const { return ceil(batch_size, micro_batch); }
  // Micro-batches of one epoch.
  constexpr std::int64_t size() const {
    return samples / batch_size * steps() + ceil(samples % batch_size, micro_batch);
  }
  // Micro-batch `i` lies within one effective batch. The parts of one batch differ by one sample at most, the larger
  // ones first: a remainder of a single sample would break batch normalisation.
  constexpr Part part(std::int64_t i) const {
    const std::int64_t begin = i / steps() * batch_size, count = std::min(batch_size, samples - begin);
    const std::int64_t parts = ceil(count, micro_batch), each = count / parts, larger = count % parts, at = i % steps();
    return {begin + at * each + std::min(at, larger), each + (at < larger ? 1 : 0)};
  }

 private:
  static constexpr std::int64_t ceil(std::int64_t count, std::int64_t by) { return count / by + (count % by != 0); }
};

}  // namespace frugal::inline v0::detail
