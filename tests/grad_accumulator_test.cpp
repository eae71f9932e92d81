#include "support/catch.hpp"
#include "support/fakes.hpp"

#include <frugal/grad_accumulator.hpp>
#include <frugal/update.hpp>

#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

using namespace frugal;
using fakes::Loss;

namespace {

struct Window {
  fakes::Model model;
  fakes::Optimizer optimizer{model};

  bool add(GradAccumulator& accumulator, double mean, double weight) {
    return accumulator.backward(Loss{mean, &model}, weight);
  }
  double stepped(GradAccumulator& accumulator) {
    update(optimizer, accumulator);
    return optimizer.seen.back();
  }
};

}  // namespace

TEST_CASE("a full window steps on the mean of its micro-batches") {
  Window window;
  GradAccumulator accumulator(4);
  CHECK(!window.add(accumulator, 1, 8));
  CHECK(!window.add(accumulator, 2, 8));
  CHECK(!window.add(accumulator, 3, 8));
  CHECK(window.add(accumulator, 6, 8));
  CHECK(accumulator.factor() == 1.0);
  CHECK(window.stepped(accumulator) == 3.0);
  CHECK(!accumulator.pending());
}

TEST_CASE("micro-batches weigh as many samples as they have") {
  Window window;
  GradAccumulator accumulator(3);
  (void)window.add(accumulator, 1, 10);
  (void)window.add(accumulator, 4, 30);
  CHECK(window.add(accumulator, 7, 60));
  CHECK(window.stepped(accumulator) == Approx((1 * 10 + 4 * 30 + 7 * 60) / 100.0));
}

TEST_CASE("a short last window is not divided by steps") {
  Window window;
  GradAccumulator accumulator(8);
  (void)window.add(accumulator, 2, 4);
  (void)window.add(accumulator, 4, 4);
  (void)window.add(accumulator, 9, 1);
  REQUIRE(accumulator.pending());
  CHECK(window.stepped(accumulator) == Approx((2 * 4 + 4 * 4 + 9 * 1) / 9.0));
}

TEST_CASE("equal weights need no pass over the gradients, whatever their sum rounds to") {
  for (const double weight : {0.1, 1.0 / 3, 7.0, 1e-9})
    for (const int steps : {3, 7, 10, 49}) {
      Window window;
      GradAccumulator accumulator(steps);
      for (int i = 0; i < steps; ++i) (void)window.add(accumulator, 1, weight);
      CHECK(accumulator.factor() == 1.0);
      CHECK(window.stepped(accumulator) == Approx(1.0));
    }
}

TEST_CASE("a micro-batch without weight contributes nothing, whatever its loss") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Window window;
  GradAccumulator accumulator(3);
  (void)window.add(accumulator, nan, 0);
  (void)window.add(accumulator, 5, 2);
  CHECK(window.add(accumulator, nan, 0));
  CHECK(window.stepped(accumulator) == Approx(5.0));
}

TEST_CASE("a window without weight is never full and starts anew") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Window window;
  GradAccumulator accumulator(2);
  CHECK(!window.add(accumulator, nan, 0));
  CHECK(!window.add(accumulator, nan, 0));
  CHECK(!accumulator.pending());
  CHECK(accumulator.factor() == 1.0);
  CHECK(!window.add(accumulator, 1, 1));
  CHECK(window.add(accumulator, 3, 1));
  CHECK(window.stepped(accumulator) == 2.0);
}

TEST_CASE("one step per micro-batch leaves the loss alone") {
  Window window;
  GradAccumulator accumulator(1);
  CHECK(window.add(accumulator, 3, 17));
  CHECK(window.stepped(accumulator) == 3.0);
}

TEST_CASE("a full window that nobody consumed is an error that changes nothing") {
  Window window;
  GradAccumulator accumulator(1);
  (void)window.add(accumulator, 3, 1);
  CHECK_THROWS_WITH(window.add(accumulator, 4, 1), ContainsSubstring("nobody consumed"));
  CHECK(window.model.gradient == 3);
  accumulator.finish();
  CHECK(window.add(accumulator, 4, 1));
}

TEST_CASE("a wrong weight is an error that changes nothing") {
  Window window;
  GradAccumulator accumulator(2);
  for (const double weight : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
    CHECK_THROWS_AS(window.add(accumulator, 1, weight), std::invalid_argument);
  CHECK(window.model.gradient == 0);
  CHECK(!accumulator.pending());
}

TEST_CASE("steps must be positive") {
  CHECK_THROWS_AS(GradAccumulator(0), std::invalid_argument);
  CHECK_THROWS_AS(GradAccumulator({.steps = -3}), std::invalid_argument);
}

TEST_CASE("an unfinished window survives its state") {
  Window window;
  GradAccumulator accumulator(3);
  (void)window.add(accumulator, 1, 4);
  (void)window.add(accumulator, 2, 6);
  fakes::Archive archive;
  accumulator.save(archive);

  GradAccumulator continued(3);
  continued.load(archive);
  CHECK(continued.pending());
  CHECK(window.add(continued, 3, 10));
  CHECK(window.stepped(continued) == Approx((1 * 4 + 2 * 6 + 3 * 10) / 20.0));
}

TEST_CASE("an unfinished window of another length is not continued, but may be started again") {
  Window window;
  GradAccumulator accumulator(3), longer(4);
  fakes::Archive between, inside;
  accumulator.save(between);
  longer.load(between);  // no window is open: another length is a new choice
  (void)window.add(accumulator, 1, 4);
  accumulator.save(inside);
  longer.load(inside);
  CHECK_THROWS_WITH(window.add(longer, 1, 4), ContainsSubstring("inside a window of 3"));
  longer.finish();
  CHECK(!window.add(longer, 1, 4));
}
