#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

// Loops over numbers in memory, from front to back, with vectors of 16 bytes, which every processor that LibTorch runs on
// has: memory is the limit, at any level of optimisation and without a choice of instructions.
namespace frugal::inline v0::detail {

template <class Value>
struct Vector {
  using Integer = std::conditional_t<sizeof(Value) == 4, std::int32_t, std::int64_t>;
  using Values [[gnu::vector_size(16)]] = Value;
  using Bits [[gnu::vector_size(16)]] = Integer;
  using Loose [[gnu::vector_size(16), gnu::aligned(sizeof(Value)), gnu::may_alias]] = Value;  // anywhere in memory
  using LooseBits [[gnu::vector_size(16), gnu::aligned(sizeof(Value)), gnu::may_alias]] = Integer;
  static constexpr std::int64_t lanes = 16 / sizeof(Value);
};

// A page ahead, in which the processor does not look by itself: one thread reads memory at nearly twice the rate.
inline void prefetch(const void* at) { __builtin_prefetch(static_cast<const char*>(at) + 4096); }

// In the precision of the values within a block, in double beyond. Not finite: something is not, or a square overflowed.
template <class Value>
double sum_of_squares(const Value* at, std::int64_t count) {
  using V = Vector<Value>;
  constexpr std::int64_t block = 4096, stride = 4 * V::lanes;
  double sum = 0;
  while (count > 0) {
    const Value* const stop = at + std::min(count, block);
    count -= stop - at;
    typename V::Values a{}, b{}, c{}, d{};  // four, since an addition takes four cycles
    for (; stop - at >= stride; at += stride) {
      prefetch(at);
      const auto* const four = reinterpret_cast<const typename V::Loose*>(at);
      a += four[0] * four[0], b += four[1] * four[1], c += four[2] * four[2], d += four[3] * four[3];
    }
    a = (a + b) + (c + d);
    for (int i = 0; i < V::lanes; ++i) sum += static_cast<double>(a[i]);
    for (; at != stop; ++at) sum += static_cast<double>(*at) * static_cast<double>(*at);
  }
  return sum;
}

// The same without overflow: not finite exactly when something is not.
template <class Value>
long double exact_sum_of_squares(const Value* at, std::int64_t count) {
  long double sum = 0;
  for (; count > 0; --count, ++at) sum += static_cast<long double>(*at) * static_cast<long double>(*at);
  return sum;
}

// The largest magnitude; NaN if there is one. Bits without the sign are ordered as the magnitudes are, infinity above all
// numbers and NaN above infinity.
template <class Value>
Value largest_magnitude(const Value* at, std::int64_t count) {
  using V = Vector<Value>;
  using Integer = typename V::Integer;
  constexpr Integer magnitude = std::numeric_limits<Integer>::max();  // all but the sign
  typename V::Bits a{}, b{};
  for (; count >= 2 * V::lanes; count -= 2 * V::lanes, at += 2 * V::lanes) {
    prefetch(at);
    const auto* const two = reinterpret_cast<const typename V::LooseBits*>(at);
    const typename V::Bits x = two[0] & magnitude, y = two[1] & magnitude;
    a = x > a ? x : a, b = y > b ? y : b;
  }
  Integer largest = 0;
  for (int i = 0; i < V::lanes; ++i) largest = std::max({largest, Integer{a[i]}, Integer{b[i]}});
  for (; count > 0; --count, ++at) largest = std::max(largest, std::bit_cast<Integer>(*at) & magnitude);
  return std::bit_cast<Value>(largest);
}

// to += weight * (from - to), from the nearer end, as LibTorch's lerp.
template <class Value>
void move_towards(Value* to, const Value* from, std::int64_t count, double weight) {
  using V = Vector<Value>;
  const auto near = static_cast<Value>(weight), far = static_cast<Value>(1 - weight);
  const bool nearer = weight < 0.5;
  for (; count >= V::lanes; count -= V::lanes, to += V::lanes, from += V::lanes) {
    prefetch(to), prefetch(from);
    auto* const out = reinterpret_cast<typename V::Loose*>(to);
    const typename V::Values x = *out, y = *reinterpret_cast<const typename V::Loose*>(from);
    *out = nearer ? x + near * (y - x) : y - (y - x) * far;
  }
  for (; count > 0; --count, ++to, ++from) *to = nearer ? *to + near * (*from - *to) : *from - (*from - *to) * far;
}

}  // namespace frugal::inline v0::detail
