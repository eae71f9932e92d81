#pragma once

#include "heap.hpp"

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#define OVERHEAD_CALLGRIND 1
#else
#define OVERHEAD_CALLGRIND 0
#endif

// Neither inlined nor looked into by its callers.
#if defined(__clang__)
#define OVERHEAD_OPAQUE [[gnu::noinline]]
#else
#define OVERHEAD_OPAQUE [[gnu::noinline, gnu::noipa]]
#endif

// Counts what a loop costs: instructions when the program runs under callgrind, else heap allocations.
namespace overhead {

inline bool under_callgrind() {
#if OVERHEAD_CALLGRIND
  return RUNNING_ON_VALGRIND != 0;
#else
  return false;
#endif
}

// Not inlined: every loop is compiled by itself, as in a program of its own.
template <class Loop, class Batch>
OVERHEAD_OPAQUE void run(Loop& loop, const Batch& batch, std::int64_t steps) {
  for (std::int64_t i = 0; i < steps; ++i) loop.step(batch);
}

// Has callgrind write down what `steps` steps of `loop` cost, as "<name> <steps>"; compare.py reads it. Counting stays
// on: switching it off would throw away all translated code.
void count_instructions([[maybe_unused]] std::string_view name, auto& loop, const auto& batch, std::int64_t steps) {
#if OVERHEAD_CALLGRIND
  const std::string label = std::string(name) + ' ' + std::to_string(steps);
  CALLGRIND_START_INSTRUMENTATION;
  run(loop, batch, 8);  // until nothing is new to it
  CALLGRIND_ZERO_STATS;
  run(loop, batch, steps);
  CALLGRIND_DUMP_STATS_AT(label.c_str());
#else
  run(loop, batch, steps);
#endif
}

// How many blocks `steps` steps of `loop` take from the heap, in this program and in every library behind it.
std::int64_t allocations(auto& loop, const auto& batch, std::int64_t steps) {
  run(loop, batch, 8);
  const std::int64_t before = heap.taken();
  run(loop, batch, steps);
  return heap.taken() - before;
}

// Prints every check and remembers whether all held.
class Checks {
 public:
  void equal(std::string_view what, std::int64_t found, std::int64_t expected) {
    note(what, found, "==", expected, found == expected);
  }
  void at_most(std::string_view what, std::int64_t found, std::int64_t limit) {
    note(what, found, "<=", limit, found <= limit);
  }
  int exit_code() const { return failed_ ? 1 : 0; }

 private:
  void note(std::string_view what, std::int64_t found, const char* relation, std::int64_t bound, bool holds) {
    std::printf("%-4s %-64.*s %6lld %s %lld\n", holds ? "ok" : "FAIL", static_cast<int>(what.size()), what.data(),
                static_cast<long long>(found), relation, static_cast<long long>(bound));
    failed_ = failed_ || !holds;
  }
  bool failed_ = false;
};

}  // namespace overhead
