#pragma once

#include <frugal/policy.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <iomanip>
#include <optional>
#include <sstream>
#include <string>

namespace examples {

// Where the time of a run goes. On a GPU, work is booked where the program waits for it, not where it was ordered.
class PhaseTimer {
 public:
  static constexpr frugal::Role role = frugal::Role::observer;

  void on_phase(frugal::Phase next) {
    book();
    current_ = next;
  }
  void on_epoch(const frugal::Progress&) {  // what comes between two epochs belongs to no phase
    book();
    current_.reset();
  }

  // "data 1.2, forward 30.4, ...", in seconds.
  std::string summary() const {
    std::ostringstream text;
    text << std::fixed << std::setprecision(1);
    for (std::size_t i = 0; i < names.size(); ++i)
      if (seconds_[i] > 0) text << (text.tellp() > 0 ? ", " : "") << names[i] << ' ' << seconds_[i];
    return text.str();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::array names = {"data", "forward", "backward", "update", "validation", "save"};  // as in Phase

  void book() {
    const auto now = Clock::now();
    if (current_) seconds_[static_cast<std::size_t>(*current_)] += std::chrono::duration<double>(now - since_).count();
    since_ = now;
  }

  std::array<double, names.size()> seconds_{};
  std::optional<frugal::Phase> current_;
  Clock::time_point since_;
};

}  // namespace examples
