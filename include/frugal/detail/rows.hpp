#pragma once

#include <frugal/detail/threads.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace frugal::inline v0::detail {

// Stretches of host memory, `Width` side by side, that LibTorch's threads work through in parts of equal size. The list is
// kept between steps, so that a steady step allocates nothing.
template <class Value, std::size_t Width>
class Rows {
 public:
  using Pointers = std::array<Value*, Width>;
  static constexpr std::int64_t most = 64;  // parts, whatever the number of threads: sums are then the same

  void clear() { rows_.clear(), count_ = 0; }
  void add(Pointers at, std::int64_t count) {
    if (count == 0) return;
    rows_.push_back({at, count_, count});
    count_ += count;
  }
  // A part is not worth a thread when all of them together are small.
  std::int64_t parts() const { return count_ == 0 ? 0 : count_ < small ? 1 : most; }

  // Calls work(part, pointers, count) for stretches of every part, in order within a part. Roughly from front to back, whoever
  // takes a part: what is touched last, and may still be in a cache, is the back.
  void each(const auto& work) {
    if (parts() == 0) return;
    std::atomic<std::int64_t> next = 0;
    const auto part = [&](std::int64_t) {
      const std::int64_t i = next++;
      visit(i, count_ * i / parts(), count_ * (i + 1) / parts(), work);
    };
    if (parts() == 1) part(0);
    else threads_.each(parts(), part);
  }

 private:
  static constexpr std::int64_t small = std::int64_t{1} << 16;

  struct Row {
    Pointers at;
    std::int64_t first, count;  // place among all elements
  };

  void visit(std::int64_t part, std::int64_t from, std::int64_t to, const auto& work) const {
    auto row = std::ranges::upper_bound(rows_, from, std::less<>{}, &Row::first) - 1;
    for (; from < to; ++row) {
      Pointers at = row->at;
      for (Value*& pointer : at) pointer += from - row->first;
      const std::int64_t count = std::min(row->first + row->count, to) - from;
      work(part, at, count);
      from += count;
    }
  }

  std::vector<Row> rows_;
  std::int64_t count_ = 0;
  Threads threads_;
};

}  // namespace frugal::inline v0::detail
