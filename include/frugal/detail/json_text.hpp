#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace frugal::inline v0::detail {

// Length of the UTF-8 sequence at the start of `text`; 0: it is none (RFC 3629: no overlong forms, no surrogates).
inline std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xC2 && first < 0xE0   ? 2
                             : (first & 0xF0) == 0xE0        ? 3
                             : first >= 0xF0 && first < 0xF5 ? 4
                                                             : 0;
  if (length == 0 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  const unsigned second = byte(1);
  const bool wrong = (first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
                     (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F);
  return wrong ? 0 : length;
}

// Appends `text` as a JSON string. std::invalid_argument: it is not UTF-8.
inline void append_json_string(std::string& out, std::string_view text) {
  constexpr std::string_view hex = "0123456789abcdef";
  out += '"';
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) throw std::invalid_argument("frugal: a name or text for a file is not UTF-8: " + out);
    const char c = text[0];
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += "\\u00";
      out += hex[static_cast<unsigned char>(c) >> 4];
      out += hex[static_cast<unsigned char>(c) & 15];
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(length);
  }
  out += '"';
}

// Reads JSON (RFC 8259) from front to back, as far as headers need it: objects, arrays, strings and integers from 0 on.
// Strict, never recursive, and what it allocates is bounded by the text. Throws std::runtime_error.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  // {"key": value, ...}: calls member(key) for each; it has to read the value. A key that comes twice is an error.
  void object(auto&& member) {
    std::set<std::string, std::less<>> keys;
    sequence('{', '}', [&] {
      const auto [key, added] = keys.insert(string());
      if (!added) fail("the key \"" + *key + "\" comes twice");
      expect(':');
      member(*key);
    });
  }
  // [value, ...]: calls element() for each; it has to read the value.
  void array(auto&& element) { sequence('[', ']', element); }

  std::string string() {
    expect('"');
    std::string out;
    for (;;) {
      if (at_ == text_.size()) fail("a string has no end");
      const char c = text_[at_];
      if (c == '"') return ++at_, out;
      if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string");
      if (c == '\\') {
        ++at_;
        append_escaped(out);
        continue;
      }
      const std::size_t length = utf8_length(text_.substr(at_));
      if (length == 0) fail("a string is not UTF-8");
      out += text_.substr(at_, length);
      at_ += length;
    }
  }

  std::int64_t integer() {
    skip_space();
    const std::size_t begin = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    const std::string_view digits = text_.substr(begin, at_ - begin);
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc{} || (digits.size() > 1 && digits[0] == '0')) fail("expected an integer from 0 to 2^63 - 1");
    return value;
  }

  // Nothing but space may follow.
  void end() {
    skip_space();
    if (at_ != text_.size()) fail("something follows the end");
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(what + " (byte " + std::to_string(at_) + " of the header's text)");
  }

 private:
  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  bool accept(char wanted) {
    skip_space();
    if (at_ == text_.size() || text_[at_] != wanted) return false;
    return ++at_, true;
  }
  void expect(char wanted) {
    if (!accept(wanted)) fail(std::string("expected '") + wanted + "'");
  }
  void sequence(char open, char close, auto&& item) {
    expect(open);
    if (accept(close)) return;
    do item();
    while (accept(','));
    expect(close);
  }

  void append_escaped(std::string& out) {
    constexpr std::string_view letters = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
    if (at_ == text_.size()) fail("a string has no end");
    const char c = text_[at_++];
    if (const std::size_t which = letters.find(c); which != std::string_view::npos) {
      out += meanings[which];
      return;
    }
    if (c != 'u') fail("an unknown escape in a string");
    char32_t code = hex4();
    if (code >= 0xD800 && code < 0xDC00) {  // the first half of a pair
      if (text_.substr(at_, 2) != "\\u") fail("half a surrogate pair");
      at_ += 2;
      const char32_t low = hex4();
      if (low < 0xDC00 || low > 0xDFFF) fail("half a surrogate pair");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    } else if (code >= 0xDC00 && code <= 0xDFFF) {
      fail("half a surrogate pair");
    }
    append_utf8(out, code);
  }
  char32_t hex4() {
    const std::string_view digits = text_.substr(at_, 4);
    std::uint32_t code = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (digits.size() != 4 || error != std::errc{} || end != digits.data() + 4)
      fail("expected four hexadecimal digits");
    at_ += 4;
    return code;
  }
  static void append_utf8(std::string& out, char32_t code) {
    const auto tail = [&](unsigned shift) { out += static_cast<char>(0x80 | ((code >> shift) & 0x3F)); };
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else if (code < 0x800) {
      out += static_cast<char>(0xC0 | (code >> 6));
      tail(0);
    } else if (code < 0x10000) {
      out += static_cast<char>(0xE0 | (code >> 12));
      tail(6), tail(0);
    } else {
      out += static_cast<char>(0xF0 | (code >> 18));
      tail(12), tail(6), tail(0);
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace frugal::inline v0::detail
