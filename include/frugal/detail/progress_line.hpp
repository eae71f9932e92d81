#pragma once

#include <frugal/detail/terminal.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

// How numbers and a bar are written on one line of text.
namespace frugal::inline v0::detail {

inline std::string formatted(const char* format, auto... values) {
  char text[64];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

// Three digits and a unit: 9.87, 98.7, 987, 9.87k, 98.7k ...
inline std::string short_number(double value) {
  const char* unit = "";
  for (const char* larger : {"k", "M", "G"})
    if (value >= 999.5) value /= 1000, unit = larger;
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return formatted("%.*f%s", decimals, value, unit);
}

// m:ss or h:mm:ss.
inline std::string duration(double seconds) {
  const auto all = static_cast<long long>(std::llround(std::clamp(seconds, 0.0, 3.6e9)));
  if (all < 3600) return formatted("%lld:%02lld", all / 60, all % 60);
  return formatted("%lld:%02lld:%02lld", all / 3600, all / 60 % 60, all % 60);
}

constexpr std::size_t least_bar = 14, widest_bar = 34;  // columns, with two spaces before it

// Two spaces and a bar of which `share`, in [0, 1], is full; nothing when there is no room for it.
inline std::string bar(std::size_t room, double share) {
  if (room < least_bar) return {};
  const bool blocks = speaks_utf8(), color = wants_color();
  const std::size_t width = std::min(room, widest_bar) - 4;
  const auto full = static_cast<std::size_t>(share * static_cast<double>(width));
  std::string text = color ? "  [\033[32m" : "  [";
  for (std::size_t i = 0; i < full; ++i) text += blocks ? "\u2588" : "#";
  if (color) text += "\033[0m";
  return text + std::string(width - full, ' ') + "]";
}

// Two spaces before each of `parts`, as many from the front as fit into `room` columns.
inline std::string joined(const std::vector<std::string>& parts, std::size_t room = std::string::npos) {
  std::string text;
  for (const std::string& part : parts) {
    if (text.size() + part.size() + 2 > room) break;
    text += "  " + part;
  }
  return text;
}

}  // namespace frugal::inline v0::detail
