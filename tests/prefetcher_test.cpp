#include "support/catch.hpp"

#include <frugal/detail/prefetcher.hpp>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using frugal::detail::Prefetcher;

std::vector<std::int64_t> all_of(auto& prefetcher) {
  std::vector<std::int64_t> found;
  while (auto item = prefetcher.take()) found.push_back(*item);
  return found;
}

// Waits until the worker has done something; the test's own time limit ends a wait for nothing.
void wait_for(const auto& condition) {
  while (!condition()) std::this_thread::yield();
}

}  // namespace

TEST_CASE("items come in order, each once, whatever is fetched ahead", "[prefetcher]") {
  for (std::int64_t ahead : {1, 2, 3, 100}) {
    Prefetcher<std::int64_t> prefetcher(3, 50, ahead, [](std::int64_t i) { return i * i; });
    const auto found = all_of(prefetcher);
    REQUIRE(found.size() == 47);
    for (std::size_t i = 0; i < found.size(); ++i) {
      const auto number = static_cast<std::int64_t>(i) + 3;
      CHECK(found[i] == number * number);
    }
    CHECK_FALSE(prefetcher.take());
    CHECK_FALSE(prefetcher.try_take());
  }
}

TEST_CASE("an empty range makes nothing", "[prefetcher]") {
  std::atomic<int> made = 0;
  Prefetcher<int> prefetcher(7, 7, 2, [&](std::int64_t) { return ++made; });
  CHECK_FALSE(prefetcher.take());
  CHECK(made == 0);
}

TEST_CASE("no more than `ahead` items are made before they are taken", "[prefetcher]") {
  std::atomic<std::int64_t> made = 0, taken = 0, most = 0;
  {
    Prefetcher<std::int64_t> prefetcher(0, 500, 3, [&](std::int64_t i) {
      const std::int64_t ahead = ++made - taken;
      if (ahead > most) most = ahead;
      return i;
    });
    wait_for([&] { return made == 3; });
    for (int i = 0; i < 200; ++i) {
      ++taken;  // before the take: what the worker sees is never too small
      CHECK(prefetcher.take() == i);
    }
  }
  CHECK(most == 3);
  CHECK(made >= 200);
  CHECK(made <= 203);
}

TEST_CASE("try_take never waits and never throws", "[prefetcher]") {
  std::atomic<bool> open = false;
  Prefetcher<int> prefetcher(0, 1, 1, [&](std::int64_t) {
    wait_for([&] { return open.load(); });
    return 5;
  });
  CHECK_FALSE(prefetcher.try_take());
  open = true;
  std::optional<int> item;
  wait_for([&] { return (item = prefetcher.try_take()).has_value(); });
  CHECK(item == 5);
}

TEST_CASE("an exception comes out where its item would have, and stays", "[prefetcher]") {
  for (std::int64_t ahead : {1, 4}) {
    std::atomic<std::int64_t> last_made = -1;
    Prefetcher<std::int64_t> prefetcher(0, 10, ahead, [&](std::int64_t i) {
      last_made = i;
      if (i == 3) throw std::runtime_error("item 3 is damaged");
      return i;
    });
    for (std::int64_t i = 0; i < 3; ++i) CHECK(prefetcher.take() == i);
    CHECK_THROWS_WITH(prefetcher.take(), "item 3 is damaged");
    CHECK_THROWS_WITH(prefetcher.take(), "item 3 is damaged");
    CHECK_FALSE(prefetcher.try_take());
    CHECK(last_made == 3);
  }
}

TEST_CASE("it can be destroyed at any time, and drops what nobody took", "[prefetcher]") {
  const auto alive = std::make_shared<int>(0);
  for (int taken = 0; taken < 6; ++taken)
    for (std::int64_t ahead : {1, 2, 8}) {
      Prefetcher<std::shared_ptr<int>> prefetcher(0, 5, ahead, [alive](std::int64_t i) {
        if (i == 4) throw std::runtime_error("never seen by anybody");
        return alive;
      });
      for (int i = 0; i < std::min(taken, 4); ++i) CHECK(prefetcher.take() == alive);
    }
  CHECK(alive.use_count() == 1);
}

TEST_CASE("several prefetchers run side by side", "[prefetcher]") {
  std::atomic<std::int64_t> sum = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        Prefetcher<std::unique_ptr<std::int64_t>> prefetcher(
            0, 100, 2, [](std::int64_t i) { return std::make_unique<std::int64_t>(i); });
        while (auto item = prefetcher.take()) sum += **item;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(sum == 4 * 20 * 4950);
}
