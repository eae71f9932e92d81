#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

/// Name-value pairs in memory, tensors included: what a policy's save() and load() see of a checkpoint.
class TensorArchive {
 public:
  template <class Value>
  void write(std::string_view name, const Value& value) {
    if constexpr (std::is_same_v<Value, at::Tensor>) values_[std::string(name)] = value.clone();
    else values_[std::string(name)] = value;
  }
  template <class Value>
  void read(std::string_view name, Value& value) const {
    value = std::get<Value>(values_.at(std::string(name)));
    if constexpr (std::is_same_v<Value, at::Tensor>) value = value.clone();
  }
  bool has(std::string_view name) const { return values_.contains(std::string(name)); }
  std::size_t size() const { return values_.size(); }
  template <class Value>
  Value get(std::string_view name) const {
    return std::get<Value>(values_.at(std::string(name)));
  }

  /// Bit for bit, NaN included.
  bool operator==(const TensorArchive& other) const {
    return std::ranges::equal(values_, other.values_, [](const auto& one, const auto& two) {
      return one.first == two.first && one.second.index() == two.second.index() &&
             std::visit(
                 [&](const auto& value) { return same(value, std::get<std::decay_t<decltype(value)>>(two.second)); },
                 one.second);
    });
  }

 private:
  static bool same(const at::Tensor& a, const at::Tensor& b) {
    return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.device() == b.device() &&
           (a.is_cpu() ? std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(), a.nbytes()) == 0
                       : a.equal(b));
  }
  static bool same(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }
  static bool same(const auto& a, const auto& b) { return a == b; }

  std::map<std::string, std::variant<std::int64_t, double, std::string, at::Tensor>> values_;
};
