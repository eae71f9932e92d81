#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

namespace frugal::inline v0::detail {

// What a policy's save(out) wrote, kept in memory for its load(in). Tensors are copied both ways: a policy may go on
// with the ones that it reads.
class Snapshot {
 public:
  template <class Value>
  void write(std::string_view name, const Value& value) {
    if constexpr (std::is_base_of_v<at::Tensor, Value>)
      values_.insert_or_assign(std::string(name), value.defined() ? value.detach().clone() : at::Tensor());
    else if constexpr (std::is_convertible_v<const Value&, std::string_view>)
      values_.insert_or_assign(std::string(name), std::string(std::string_view(value)));
    else values_.insert_or_assign(std::string(name), value);
  }
  template <class Value>
  void read(std::string_view name, Value& value) const {
    const auto found = values_.find(std::string(name));
    TORCH_CHECK(found != values_.end() && std::holds_alternative<Value>(found->second), "frugal: load() reads '", name,
                "', which save() did not write with that type.");
    if constexpr (std::is_same_v<Value, at::Tensor>) {
      const at::Tensor& kept = std::get<at::Tensor>(found->second);
      value = kept.defined() ? kept.clone() : at::Tensor();
    } else {
      value = std::get<Value>(found->second);
    }
  }
  bool has(std::string_view name) const { return values_.contains(std::string(name)); }

 private:
  std::map<std::string, std::variant<at::Tensor, std::int64_t, double, std::string>> values_;
};

}  // namespace frugal::inline v0::detail
