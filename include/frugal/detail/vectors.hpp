#pragma once

#include <c10/util/BFloat16.h>

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

// Some values from anywhere in memory. (g++ 12 forgets that they may lie anywhere where such a pointer is indexed.)
template <class Value>
typename Vector<Value>::Values load(const Value* at) {
  return *reinterpret_cast<const typename Vector<Value>::Loose*>(at);
}
template <class Value>
typename Vector<Value>::Bits load_bits(const Value* at) {
  return *reinterpret_cast<const typename Vector<Value>::LooseBits*>(at);
}

// A page ahead, where the processor does not look by itself.
inline void prefetch(const void* at) { __builtin_prefetch(static_cast<const char*>(at) + 4096); }

// Adds the squares of one cache line to four sums, since an addition takes four cycles.
template <class Value>
void add_squares(const Value* line, typename Vector<Value>::Values (&sums)[4]) {
  prefetch(line);
  constexpr auto lanes = Vector<Value>::lanes;
  const auto a = load(line), b = load(line + lanes), c = load(line + 2 * lanes), d = load(line + 3 * lanes);
  sums[0] += a * a, sums[1] += b * b, sums[2] += c * c, sums[3] += d * d;  // a loop would keep them in memory
}

// In the precision of the values within a block, in double beyond. Not finite: something is not, or a square overflowed. Four
// places are read at a time: memory gives one thread twice as much that way.
template <class Value>
double sum_of_squares(const Value* at, std::int64_t count) {
  constexpr std::int64_t line = 4 * Vector<Value>::lanes, block = 64 * line;
  const std::int64_t quarter = count / 4 / line * line;
  double sum = 0;
  for (std::int64_t i = 0; i < quarter;) {
    typename Vector<Value>::Values sums[4] = {};
    for (const std::int64_t stop = std::min(i + block, quarter); i < stop; i += line) {
      add_squares(at + i, sums), add_squares(at + i + quarter, sums);
      add_squares(at + i + 2 * quarter, sums), add_squares(at + i + 3 * quarter, sums);
    }
    const auto all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int lane = 0; lane < Vector<Value>::lanes; ++lane) sum += static_cast<double>(all[lane]);
  }
  for (std::int64_t i = 4 * quarter; i < count; ++i) sum += static_cast<double>(at[i]) * static_cast<double>(at[i]);
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
    const typename V::Bits x = load_bits(at) & magnitude, y = load_bits(at + V::lanes) & magnitude;
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
    const typename V::Values x = *out, y = load(from);
    *out = nearer ? x + near * (y - x) : y - (y - x) * far;
  }
  for (; count > 0; --count, ++to, ++from) *to = nearer ? *to + near * (*from - *to) : *from - (*from - *to) * far;
}

// to += from. Numbers of 16 bits are exact in float: bfloat16 is its upper half.
template <class Low>
void add_widened(float* to, const Low* from, std::int64_t count) {
  using V = Vector<float>;
  using Halves [[gnu::vector_size(8)]] = std::uint16_t;
  using Loose [[gnu::vector_size(8), gnu::aligned(2), gnu::may_alias]] = std::uint16_t;
  if constexpr (std::is_same_v<Low, c10::BFloat16>)
    for (; count >= 4 * V::lanes; count -= 4 * V::lanes, to += 4 * V::lanes, from += 4 * V::lanes) {
      prefetch(to), prefetch(from);
      for (int i = 0; i < 4; ++i) {
        const Halves upper = *reinterpret_cast<const Loose*>(from + i * V::lanes);
        *reinterpret_cast<V::Loose*>(to + i * V::lanes) +=
            std::bit_cast<V::Values>(__builtin_convertvector(upper, V::Bits) << 16);
      }
    }
  for (; count > 0; --count, ++to, ++from) *to += static_cast<float>(*from);
}

}  // namespace frugal::inline v0::detail
