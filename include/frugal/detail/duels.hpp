#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

// Several ways to do one thing, measured in turns: which is the fastest, on a machine that others use as well.
namespace frugal::inline v0::detail {

// How much faster one way is than another: of the rounds that both took part in.
struct Ratio { double median = 1, low = 1, high = 1; };

class Duels {
 public:
  // `wait` returns when a device has finished; `clock` may be empty: the steady one.
  Duels(std::function<std::chrono::steady_clock::time_point()> clock, double turn, std::function<void()> wait)
      : clock_(clock ? std::move(clock) : &std::chrono::steady_clock::now), turn_(turn), wait_(std::move(wait)) {}

  // In each round every way is prepared and then measured once, in an order that changes. A way that is clearly slower
  // after three rounds is left out; the first one never is, others are compared with it.
  void run(std::size_t ways, std::int64_t rounds, double seconds, auto&& prepare, auto&& step) {
    seconds_.assign(ways, {});
    std::vector<std::size_t> running(ways);
    for (std::size_t i = 0; i < ways; ++i) running[i] = i;
    for (const std::size_t way : running) prepare(way), step();  // first calls choose and compile
    const auto started = clock_();
    for (std::int64_t round = 0; round < rounds && (round < 3 || since(started) < seconds); ++round) {
      for (const std::size_t way : running) {
        prepare(way);
        seconds_[way].push_back(measure(step));
      }
      for (std::size_t way = 0; way < ways; ++way)
        if (std::ranges::find(running, way) == running.end()) seconds_[way].push_back(left_out);
      if (round >= 2) std::erase_if(running, [&](std::size_t way) { return way != 0 && hopeless(way); });
      std::ranges::rotate(running, running.begin() + 1);
    }
  }

  // How much faster `one` is than `other`.
  Ratio ratio(std::size_t one, std::size_t other) const {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < seconds_[one].size(); ++i)
      if (seconds_[one][i] != left_out && seconds_[other][i] != left_out)
        ratios.push_back(seconds_[other][i] / seconds_[one][i]);
    if (ratios.empty()) return {0, 0, 0};
    std::ranges::sort(ratios);
    return {ratios[ratios.size() / 2], ratios.front(), ratios.back()};
  }
  // The rounds that a way took part in.
  std::int64_t rounds(std::size_t way) const {
    return std::ssize(seconds_[way]) - std::ranges::count(seconds_[way], left_out);
  }
  // The first way, unless a later one saves more than `margin` of the time of the best so far.
  std::size_t winner(double margin) const {
    std::size_t best = 0;
    for (std::size_t way = 1; way < seconds_.size(); ++way)
      if (ratio(way, best).median * (1 - margin) > 1) best = way;
    return best;
  }

 private:
  static constexpr double left_out = std::numeric_limits<double>::infinity();
  static constexpr double clearly = 1.15;

  double since(std::chrono::steady_clock::time_point start) const {
    return std::chrono::duration<double>(clock_() - start).count();
  }

  // Seconds of one step. The first one after a change finds cold caches and is not counted, unless it is long.
  double measure(auto&& step) {
    const double first = timed(step, 1);
    if (first >= 10 * turn_) return first;
    double each = first;
    for (std::int64_t times = 1;; times *= 2) {
      const double all = timed(step, times);
      each = all / static_cast<double>(times);
      if (all >= turn_ || times >= most_steps) return each;
    }
  }
  double timed(auto&& step, std::int64_t times) {
    wait_();
    const auto started = clock_();
    for (std::int64_t i = 0; i < times; ++i) step();
    wait_();
    return since(started);
  }
  static constexpr std::int64_t most_steps = 1024;

  bool hopeless(std::size_t way) const {
    for (std::size_t other = 0; other < seconds_.size(); ++other)
      if (other != way && ratio(other, way).median > clearly) return true;
    return false;
  }

  std::function<std::chrono::steady_clock::time_point()> clock_;
  double turn_;
  std::function<void()> wait_;
  std::vector<std::vector<double>> seconds_;  // of every way, by round
};

}  // namespace frugal::inline v0::detail
