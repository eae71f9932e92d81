#pragma once

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include <sys/ioctl.h>
#include <unistd.h>

// What a stream can show, as its environment tells, and how a line on it ends.
namespace frugal::inline v0::detail {

// The value of an environment variable; empty when it is not set.
inline std::string_view terminal_variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// A terminal where a line can be redrawn. Logs of continuous integration are none, whatever they pretend.
inline bool can_redraw(std::FILE* stream) {
  const std::string_view terminal = terminal_variable("TERM");
  return isatty(fileno(stream)) == 1 && !terminal.empty() && terminal != "dumb" && terminal_variable("CI").empty();
}

// Columns of the terminal as it is now; 80 when it does not say.
inline int columns_of(std::FILE* stream) {
  winsize size{};
  const bool known = ioctl(fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

// https://no-color.org
inline bool wants_color() { return terminal_variable("NO_COLOR").empty(); }

// The locale of the environment, which is the terminal's, even in a program that never called setlocale().
inline bool speaks_utf8() {
  std::string_view locale;
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"})
    if (locale.empty()) locale = terminal_variable(name);
  std::string lower(locale);
  std::ranges::transform(lower, lower.begin(), [](unsigned char letter) { return std::tolower(letter); });
  return lower.ends_with("utf-8") || lower.ends_with("utf8");
}

// The deleter of a pointer to a stream that does not own the stream, but the end of an open line on it: whoever was
// moved from has neither.
struct EndLine {
  bool open = false;
  void operator()(std::FILE* stream) const {
    if (open) std::fputs("\n", stream), std::fflush(stream);
  }
};

}  // namespace frugal::inline v0::detail
