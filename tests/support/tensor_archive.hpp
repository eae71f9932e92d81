#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
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
  template <class Value>
  Value get(std::string_view name) const {
    return std::get<Value>(values_.at(std::string(name)));
  }

 private:
  std::map<std::string, std::variant<std::int64_t, double, std::string, at::Tensor>> values_;
};
