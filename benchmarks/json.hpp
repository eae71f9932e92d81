#pragma once

#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bench {

/// A JSON text under construction, so that a subject builds where there is nothing but LibTorch. Numbers that JSON does not know
/// (NaN, infinity) become null.
class Json {
 public:
  Json(bool value) : text_(value ? "true" : "false") {}
  Json(std::integral auto value) : text_(std::to_string(value)) {}
  Json(double value) : text_("null") {
    char digits[32];
    if (std::isfinite(value)) text_.assign(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
  }
  Json(std::string_view value) : text_(quoted(value)) {}
  Json(const char* value) : Json(std::string_view(value)) {}
  Json(const std::string& value) : Json(std::string_view(value)) {}
  template <class Value>
  Json(const std::vector<Value>& values) : text_("[") {
    for (const auto& value : values) text_ += (text_.size() > 1 ? "," : "") + Json(value).text_;
    text_ += ']';
  }
  /// An object.
  Json(std::initializer_list<std::pair<std::string_view, Json>> members) : text_("{") {
    for (const auto& [name, value] : members) text_ += (text_.size() > 1 ? "," : "") + quoted(name) + ':' + value.text_;
    text_ += '}';
  }

  const std::string& text() const { return text_; }

 private:
  static std::string quoted(std::string_view value) {
    std::string text = "\"";
    for (const char c : value) {
      if (c == '"' || c == '\\') text += '\\';
      if (c == '\n') text += "\\n";
      else text += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return text + '"';
  }

  std::string text_;
};

}  // namespace bench
