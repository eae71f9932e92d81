#include "support/catch.hpp"

#include <frugal/detail/testing_clock.hpp>

#include <chrono>
#include <functional>

TEST_CASE("a fake clock moves when it is told to, in all its copies", "[testing]") {
  using namespace std::chrono_literals;
  frugal::testing::FakeClock clock;
  const std::function<std::chrono::steady_clock::time_point()> given_away = clock;
  CHECK(given_away().time_since_epoch() == 0s);
  CHECK(given_away() == given_away());
  clock.advance(90s);
  CHECK(given_away().time_since_epoch() == 90s);
  clock.advance(1ns);
  CHECK(clock.now().time_since_epoch() == 90s + 1ns);
  clock.set(std::chrono::steady_clock::time_point(5min));
  CHECK(given_away().time_since_epoch() == 5min);
  CHECK(frugal::testing::FakeClock().now().time_since_epoch() == 0s);
}
