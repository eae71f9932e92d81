#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

/// LibTorch's warnings while it lives, instead of on the terminal.
class CaughtWarnings : c10::WarningHandler {
 public:
  std::size_t count() const { return texts_.size(); }
  /// How many hold this text.
  std::ptrdiff_t with(const std::string& text) const {
    return std::ranges::count_if(texts_, [&](const std::string& one) { return one.find(text) != std::string::npos; });
  }

 private:
  void process(const c10::Warning& warning) override { texts_.push_back(warning.msg()); }

  std::vector<std::string> texts_;
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};
