#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>

// The dtypes that the safetensors format knows, by their names there.
namespace frugal::inline v0::detail {

inline constexpr std::array<std::pair<c10::ScalarType, std::string_view>, 17> tensor_types{{
    {c10::ScalarType::Double, "F64"},
    {c10::ScalarType::Float, "F32"},
    {c10::ScalarType::Half, "F16"},
    {c10::ScalarType::BFloat16, "BF16"},
    {c10::ScalarType::Long, "I64"},
    {c10::ScalarType::Int, "I32"},
    {c10::ScalarType::Short, "I16"},
    {c10::ScalarType::Char, "I8"},
    {c10::ScalarType::Byte, "U8"},
    {c10::ScalarType::UInt16, "U16"},
    {c10::ScalarType::UInt32, "U32"},
    {c10::ScalarType::UInt64, "U64"},
    {c10::ScalarType::Bool, "BOOL"},
    {c10::ScalarType::ComplexFloat, "C64"},
    {c10::ScalarType::Float8_e4m3fn, "F8_E4M3"},
    {c10::ScalarType::Float8_e5m2, "F8_E5M2"},
    {c10::ScalarType::Float8_e8m0fnu, "F8_E8M0"},
}};

inline std::optional<std::string_view> name_of_type(c10::ScalarType type) {
  const auto found = std::ranges::find(tensor_types, type, [](const auto& pair) { return pair.first; });
  return found == tensor_types.end() ? std::nullopt : std::optional(found->second);
}
inline std::optional<c10::ScalarType> type_of_name(std::string_view name) {
  const auto found = std::ranges::find(tensor_types, name, [](const auto& pair) { return pair.second; });
  return found == tensor_types.end() ? std::nullopt : std::optional(found->first);
}

}  // namespace frugal::inline v0::detail
