#include "support/catch.hpp"
#include "support/fakes.hpp"

#include <frugal/early_stopper.hpp>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

using namespace frugal;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

std::vector<Verdict> verdicts(EarlyStopper& stopper, const std::vector<double>& metrics) {
  std::vector<Verdict> out;
  for (const double metric : metrics) out.push_back(stopper.observe(metric));
  return out;
}
constexpr auto improved = Verdict::improved, waiting = Verdict::waiting, stop = Verdict::stop;

}  // namespace

TEST_CASE("the patience-th failing check in a row stops") {
  EarlyStopper stopper({.patience = 2});
  CHECK(verdicts(stopper, {3, 2, 2.5, 1, 1, 1.5}) == std::vector{improved, improved, waiting, improved, waiting, stop});
  CHECK(stopper.reason() == StopReason::plateau);
  CHECK(stopper.best() == 1);
  CHECK(stopper.best_at() == 3);
  CHECK(stopper.waited() == 2);
}

TEST_CASE("patience 1 stops at the first failing check") {
  EarlyStopper stopper({.patience = 1});
  CHECK(verdicts(stopper, {3, 3}) == std::vector{improved, stop});
}

TEST_CASE("improvement is strict, and by more than delta") {
  EarlyStopper absolute({.patience = 9, .min_delta = 0.5});
  CHECK(verdicts(absolute, {3, 2.5, 2.49}) == std::vector{improved, waiting, improved});
  EarlyStopper relative({.patience = 9, .min_delta = 0.25, .relative = true});
  CHECK(verdicts(relative, {-4, -5, -5.1}) == std::vector{improved, waiting, improved});
  EarlyStopper maximize({.patience = 9, .min_delta = 0.5, .goal = Goal::maximize});
  CHECK(verdicts(maximize, {1, 1.5, 1.6}) == std::vector{improved, waiting, improved});
}

TEST_CASE("warm-up checks do not count, but the best one moves") {
  EarlyStopper stopper({.patience = 1, .warmup = 3});
  CHECK(verdicts(stopper, {1, 5, 5}) == std::vector{improved, waiting, waiting});
  CHECK(stopper.best() == 1);
  CHECK(stopper.observe(2) == stop);
}

TEST_CASE("target, divergence and non-finite hold during warm-up") {
  EarlyStopper target({.warmup = 5, .target = 0.5});
  CHECK(target.observe(0.5) == stop);
  CHECK(target.reason() == StopReason::target_reached);
  EarlyStopper diverged({.warmup = 5, .diverged_at = 100});
  CHECK(diverged.observe(100) == stop);
  CHECK(diverged.reason() == StopReason::diverged);
  EarlyStopper finite({.warmup = 5, .non_finite = NonFinite::stop});
  CHECK(finite.observe(not_a_number) == stop);
  CHECK(finite.reason() == StopReason::non_finite);
}

TEST_CASE("a check can stop the run and be the best one") {
  EarlyStopper stopper({.goal = Goal::maximize, .target = 0.9});
  CHECK(verdicts(stopper, {0.5, 0.95}) == std::vector{improved, stop});
  CHECK(stopper.best() == 0.95);
  CHECK(stopper.best_at() == 1);
}

TEST_CASE("a non-finite metric never improves and never becomes best") {
  EarlyStopper stopper({.patience = 3});
  CHECK(std::isnan(stopper.best()));
  CHECK(stopper.best_at() == -1);
  CHECK(verdicts(stopper, {not_a_number, -infinity, 2, not_a_number}) ==
        std::vector{waiting, waiting, improved, waiting});
  CHECK(stopper.best() == 2);
  CHECK(stopper.best_at() == 2);
  CHECK(stopper.waited() == 1);
}

TEST_CASE("non-finite metrics count towards patience, or are ignored") {
  EarlyStopper count({.patience = 2});
  CHECK(verdicts(count, {1, not_a_number, not_a_number}) == std::vector{improved, waiting, stop});
  EarlyStopper ignore({.patience = 2, .non_finite = NonFinite::ignore});
  CHECK(verdicts(ignore, {1, not_a_number, not_a_number, not_a_number, 2, 2}) ==
        std::vector{improved, waiting, waiting, waiting, waiting, stop});
}

TEST_CASE("an infinite metric on the bad side has diverged") {
  EarlyStopper stopper({.diverged_at = 100});
  CHECK(stopper.observe(infinity) == stop);
  CHECK(stopper.reason() == StopReason::diverged);
}

TEST_CASE("smoothing compares the smoothed metric; target and divergence look at the metric itself") {
  EarlyStopper stopper({.patience = 9, .smoothing = 0.5, .target = 0.1, .diverged_at = 50});
  CHECK(stopper.observe(4) == improved);
  CHECK(stopper.observe(2) == improved);
  CHECK(stopper.best() == 3);  // 0.5 * 4 + 0.5 * 2
  CHECK(stopper.observe(not_a_number) == waiting);
  CHECK(stopper.observe(3.5) == waiting);  // 3.25
  CHECK(stopper.best() == 3);
  CHECK(stopper.observe(0.1) == stop);  // the smoothed one is 1.675
  CHECK(stopper.reason() == StopReason::target_reached);
}

TEST_CASE("once stopped it stays so, until a new stage") {
  EarlyStopper stopper({.patience = 1});
  verdicts(stopper, {1, 2});
  CHECK(stopper.observe(0) == stop);
  CHECK(stopper.best() == 1);
  stopper.new_stage();
  CHECK(stopper.reason() == StopReason::none);
  CHECK(stopper.best_at() == -1);
  CHECK(verdicts(stopper, {50, 40, 60}) == std::vector{improved, improved, stop});
}

TEST_CASE("an interrupted run stops where an uninterrupted one does") {
  const std::vector<double> metrics{5, 4, 4.5, 3, not_a_number, 3.5, 2.9, 3, 3.1, 3.2, 3.3};
  const EarlyStopperOptions options{.patience = 3, .warmup = 2, .smoothing = 0.3};
  EarlyStopper whole(options);
  const auto expected = verdicts(whole, metrics);
  std::vector<Verdict> got;
  fakes::Archive archive;
  EarlyStopper(options).save(archive);
  for (const double metric : metrics) {
    EarlyStopper continued(options);
    continued.load(archive);
    got.push_back(continued.observe(metric));
    continued.save(archive);
  }
  CHECK(got == expected);
}

TEST_CASE("options out of range are refused") {
  CHECK_THROWS_AS(EarlyStopper({.patience = 0}), std::invalid_argument);
  CHECK_THROWS_AS(EarlyStopper({.min_delta = -1}), std::invalid_argument);
  CHECK_THROWS_AS(EarlyStopper({.min_delta = not_a_number}), std::invalid_argument);
  CHECK_THROWS_AS(EarlyStopper({.warmup = -1}), std::invalid_argument);
  CHECK_THROWS_AS(EarlyStopper({.smoothing = 1}), std::invalid_argument);
  CHECK_THROWS_AS(EarlyStopper({.target = not_a_number}), std::invalid_argument);
}
