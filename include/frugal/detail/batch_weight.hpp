#pragma once

#include <concepts>
#include <cstdint>
#include <ranges>
#include <tuple>
#include <type_traits>

// How many samples a batch holds, and how much its mean loss weighs.
namespace frugal::inline v0::detail {

template <class Type>
concept TensorLike = requires(const Type& tensor) {
  { tensor.size(0) } -> std::convertible_to<std::int64_t>;
  { tensor.dim() } -> std::convertible_to<std::int64_t>;
};

// LibTorch's Example<> and its like.
template <class Type>
concept ExampleLike =
    requires(const Type& example) { example.data; } && !requires(const Type& range) { range.begin(); };

template <class Type>
concept TupleLike = requires { std::tuple_size<Type>::value; };

// A batch that knows its size: one that is no range, since the size of a range may be the number of its tensors.
template <class Type>
concept Sized = !std::ranges::range<const Type> && requires(const Type& batch) {
  { batch.size() } -> std::convertible_to<std::int64_t>;
};

template <class Type>
concept NamesItsWeight = requires(const Type& batch) {
  { batch_weight(batch) } -> std::convertible_to<double>;  // found by argument-dependent look-up only
};

template <class Type>
consteval bool can_count() {
  if constexpr (Sized<Type> || TensorLike<Type>) return true;
  else if constexpr (ExampleLike<Type>) return can_count<std::remove_cvref_t<decltype(Type::data)>>();
  else if constexpr (TupleLike<Type> && !std::ranges::range<const Type>) {
    if constexpr (std::tuple_size_v<Type> == 0) return false;
    else return can_count<std::remove_cvref_t<std::tuple_element_t<0, Type>>>();
  } else if constexpr (std::ranges::random_access_range<const Type>) {
    using Element = std::ranges::range_value_t<const Type>;
    return TensorLike<Element> || ExampleLike<Element>;
  } else return false;
}

// Samples in a batch whose type can be counted.
template <class Type>
  requires(can_count<Type>())
std::int64_t samples_in(const Type& batch) {
  if constexpr (Sized<Type>) return static_cast<std::int64_t>(batch.size());
  else if constexpr (TensorLike<Type>) return static_cast<std::int64_t>(batch.size(0));
  else if constexpr (ExampleLike<Type>) return samples_in(batch.data);
  else if constexpr (TupleLike<Type> && !std::ranges::range<const Type>) return samples_in(std::get<0>(batch));
  else if constexpr (ExampleLike<std::ranges::range_value_t<const Type>>)
    return static_cast<std::int64_t>(std::ranges::size(batch));  // an uncollated list of single samples
  else return std::ranges::empty(batch) ? 0 : samples_in(*std::ranges::begin(batch));
}

template <class Type>
constexpr bool weighable = NamesItsWeight<Type> || can_count<Type>();

// The weight of a batch whose loss function does not say otherwise. Without an accumulator it does not matter, and a type
// that cannot be weighed counts as one.
template <class Type>
double weight_of(const Type& batch) {
  if constexpr (NamesItsWeight<Type>) return static_cast<double>(batch_weight(batch));
  else if constexpr (can_count<Type>()) return static_cast<double>(samples_in(batch));
  else return 1.0;
}

}  // namespace frugal::inline v0::detail
