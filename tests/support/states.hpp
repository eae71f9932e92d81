#pragma once

#include <frugal/detail/checkpoint_contents.hpp>

#include <ATen/ops/equal.h>

#include <map>
#include <string>

/// What a checkpoint of these arguments would hold, as a file gives it back: every tensor a copy in host memory.
inline frugal::detail::State stored(auto&... arguments) {
  frugal::detail::State state = frugal::detail::collect(frugal::Progress{}, arguments...);
  for (auto& [name, tensor] : state.tensors) tensor = tensor.cpu().clone(at::MemoryFormat::Contiguous);
  return state;
}

/// Dtype, shape and bits.
inline bool same_bits(const at::Tensor& one, const at::Tensor& other) {
  if (one.scalar_type() != other.scalar_type() || one.sizes() != other.sizes()) return false;
  const auto bytes = [](const at::Tensor& tensor) { return tensor.contiguous().reshape({-1}).view(at::kByte); };
  return one.numel() == 0 || at::equal(bytes(one), bytes(other));
}

/// The name of the first value or tensor whose bits differ; empty: there is none.
inline std::string difference(const frugal::detail::State& one, const frugal::detail::State& other) {
  const auto first = [](const auto& a, const auto& b, auto&& same) -> std::string {
    for (const auto& [name, value] : a)
      if (const auto found = b.find(name); found == b.end() || !same(value, found->second)) return name;
    for (const auto& [name, value] : b)
      if (!a.contains(name)) return name;
    return {};
  };
  const std::string name = first(one.values, other.values, [](const auto& a, const auto& b) { return a == b; });
  return name.empty() ? first(one.tensors, other.tensors, same_bits) : name;
}
