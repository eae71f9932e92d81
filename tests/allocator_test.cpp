#include "support/catch.hpp"

#include <frugal/allocator.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <utility>

#include <unistd.h>

#if defined(__GLIBC__)
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

// malloc is set for the whole process, and for good: every test runs in a child of its own and sends back what it saw.

using frugal::AllocatorTuning;
using frugal::detail::BlockFate, frugal::detail::held_memory;

namespace {

constexpr std::size_t megabyte = std::size_t{1} << 20;
constexpr std::size_t block_bytes = 160 * megabyte;  // more than the end of the heap keeps when it is trimmed: 64 MB
constexpr const char* variables[] = {"GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_",
                                     "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"};

// What `body` returns when it runs in a child.
template <class Body>
auto in_child(Body body) {
  using Seen = decltype(body());
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);  // faults are counted: one per page of 4 KB
    const Seen seen = body();
    _exit(write(ends[1], &seen, sizeof seen) == sizeof seen ? 0 : 1);
  }
  close(ends[1]);
  Seen seen{};
  const auto got = read(ends[0], &seen, sizeof seen);
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE((WIFEXITED(status) && WEXITSTATUS(status) == 0 && got == static_cast<decltype(got)>(sizeof seen)));
  return seen;
}

// Page faults of allocating a block, writing to all of its pages, and freeing it.
long faults_of(std::size_t bytes) {
  const auto faults = [] {
    rusage now{};
    getrusage(RUSAGE_SELF, &now);
    return now.ru_minflt;
  };
  const long before = faults();
  void* volatile block = std::malloc(bytes);
  for (std::size_t at = 0; at < bytes; at += 4096) static_cast<volatile char*>(block)[at] = 1;
  std::free(block);
  return faults() - before;
}

// Of a step like the one before.
long faults_of_a_second_step() {
  faults_of(block_bytes);
  return faults_of(block_bytes);
}

std::int64_t resident_pages() {
  std::int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident;
}

// Whether these tests can see anything: glibc's malloc, as it is without settings.
bool measurable() {
  bool plain = frugal::detail::fate_of_large_block() != BlockFate::unseen;
  for (const char* variable : variables) plain = plain && !std::getenv(variable);
  if (!plain) WARN("skipped: not glibc's malloc as it is without settings");
  return plain;
}

const long pages = static_cast<long>(block_bytes) / sysconf(_SC_PAGESIZE);

}  // namespace

TEST_CASE("without it every large block is faulted in again, with it a freed one is reused") {
  if (!measurable()) return;
  CHECK(in_child(faults_of_a_second_step) >= pages);
  struct Seen {
    AllocatorTuning first, second;
    long faults;
  };
  const Seen seen = in_child([] {
    const AllocatorTuning first = frugal::tune_allocator();
    const long faults = faults_of_a_second_step();
    return Seen{first, frugal::tune_allocator(), faults};
  });
  CHECK(seen.first == AllocatorTuning::effective);
  CHECK(seen.second == AllocatorTuning::effective);
  CHECK(seen.faults < pages / 100);
}

TEST_CASE("blocks of hundreds of megabytes come from the heap, and several at once are kept") {
  if (!measurable()) return;
  struct Seen { std::uint32_t plain, tuned, kept; };
  const Seen seen = in_child([] {
    const auto mapped_for_two = [](std::size_t bytes) {
      const std::uint32_t before = held_memory().mapped;
      void* volatile one = std::malloc(bytes);
      void* volatile other = std::malloc(bytes);
      const std::uint32_t mapped = held_memory().mapped - before;
      std::free(one), std::free(other);
      return mapped;
    };
    const std::uint32_t plain = mapped_for_two(700 * megabyte);
    frugal::tune_allocator();
    const std::uint32_t tuned = mapped_for_two(700 * megabyte);
    return Seen{plain, tuned, held_memory().heap};
  });
  CHECK(seen.plain >= 1400 * megabyte);
  CHECK(seen.tuned == 0);
  CHECK(seen.kept >= 1400 * megabyte);
}

TEST_CASE("the price: what was freed stays resident until malloc_trim gives it back") {
  if (!measurable()) return;
  struct Seen { std::int64_t plain, tuned, trimmed; };
  const Seen seen = in_child([] {
    const std::int64_t before = resident_pages();
    faults_of(block_bytes);
    const std::int64_t plain = resident_pages() - before;
    frugal::tune_allocator();
    faults_of(block_bytes);
    const std::int64_t tuned = resident_pages() - before;
    malloc_trim(0);
    return Seen{plain, tuned, resident_pages() - before};
  });
  CHECK(seen.plain < pages / 10);
  CHECK(seen.tuned > pages * 9 / 10);
  CHECK(seen.trimmed < pages / 10);
}

TEST_CASE("finding out costs no memory, and where it is called does not matter") {
  if (!measurable()) return;
  struct Seen {
    AllocatorTuning result;
    std::int64_t pages;
    long faults;
  };
  const Seen seen = in_child([] {
    AllocatorTuning result{};
    const std::int64_t before = resident_pages();
    std::thread([&] { result = frugal::tune_allocator(); }).join();
    const std::int64_t more = resident_pages() - before;
    return Seen{result, more, faults_of_a_second_step()};
  });
  CHECK(seen.result == AllocatorTuning::effective);
  CHECK(seen.pages < pages / 10);
  CHECK(seen.faults < pages / 100);
}

TEST_CASE("what the user set in the environment is left alone") {
  if (!measurable()) return;
  struct Seen {
    AllocatorTuning result;
    long faults;
    std::uint32_t grown;
  };
  // glibc read the environment when the process began: what is in force are its defaults
  const auto seen_with = [](const char* variable, const char* value) {
    return in_child([=] {
      setenv(variable, value, 1);
      const AllocatorTuning result = frugal::tune_allocator();
      const long faults = faults_of_a_second_step();
      malloc_trim(0);
      const std::uint32_t before = held_memory().heap;
      void* volatile block = std::malloc(200 * megabyte);
      const std::uint32_t grown = held_memory().heap - before;
      std::free(block);
      return Seen{result, faults, grown};
    });
  };
  for (const auto& [variable, value] :
       {std::pair("MALLOC_MMAP_THRESHOLD_", "131072"), std::pair("MALLOC_MMAP_MAX_", "65536"),
        std::pair("MALLOC_TRIM_THRESHOLD_", "131072"),
        std::pair("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072"),
        std::pair("GLIBC_TUNABLES", "glibc.malloc.check=0:glibc.malloc.mmap_max=9"),
        std::pair("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")}) {
    INFO(variable << '=' << value);
    const Seen seen = seen_with(variable, value);
    CHECK(seen.result == AllocatorTuning::overruled);
    CHECK(seen.faults >= pages / 2);
  }
  for (const auto& [variable, value] :
       {std::pair("MALLOC_TOP_PAD_", "131072"), std::pair("GLIBC_TUNABLES", "glibc.malloc.top_pad=131072")}) {
    INFO(variable << '=' << value);
    const Seen seen = seen_with(variable, value);
    CHECK(seen.result == AllocatorTuning::effective);
    CHECK(seen.faults < pages / 100);
    CHECK(seen.grown < 230 * megabyte);
  }
  const Seen free_choice = seen_with("GLIBC_TUNABLES", "glibc.malloc.arena_max=1");
  CHECK(free_choice.result == AllocatorTuning::effective);
  CHECK(free_choice.grown > 230 * megabyte);  // with the padding
}

static_assert(std::string_view(to_string(AllocatorTuning::effective)) == "effective");
static_assert(std::string_view(to_string(AllocatorTuning::overruled)) == "overruled by the environment");
static_assert(std::string_view(to_string(AllocatorTuning::unavailable)) == "unavailable");

TEST_CASE("where another allocator serves malloc, nothing is done") {
  if (frugal::detail::fate_of_large_block() != BlockFate::unseen) return;  // a sanitizer's build
  CHECK(frugal::tune_allocator() == AllocatorTuning::unavailable);
}

#else

TEST_CASE("where there is no glibc, nothing is done") {
  CHECK(frugal::tune_allocator() == frugal::AllocatorTuning::unavailable);
}

#endif
