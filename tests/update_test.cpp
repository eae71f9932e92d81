#include "support/catch.hpp"
#include "support/fakes.hpp"

#include <frugal/grad_accumulator.hpp>
#include <frugal/update.hpp>

#include <limits>
#include <stdexcept>
#include <vector>

using namespace frugal;
using fakes::Log;

namespace {

struct Precision {
  static constexpr Role role = Role::precision;
  Log& log;
  bool overflow = false;
  double factor = 0;
  int abandoned = 0;

  int autocast() { return 0; }
  auto& scale(auto& loss) { return log.push_back("scale"), loss; }
  void unscale(auto& optimizer, double by) {
    log.push_back("unscale");
    factor = by;
    if (by != 1) optimizer.multiply_gradients(by);
  }
  bool step(auto& optimizer) {
    if (!overflow) optimizer.step();
    return !overflow;
  }
  void abandon(auto&) { ++abandoned; }
};
struct Clip {
  static constexpr Role role = Role::clipping;
  Log& log;
  bool throws = false;
  void clip(auto&) {
    log.push_back("clip");
    if (throws) throw std::runtime_error("clip");
  }
};
struct Fused {
  static constexpr Role role = Role::update;
  Log& log;
  void step(auto& optimizer) { log.push_back("fused"), optimizer.step(); }
};

struct Loop {
  Log log;
  fakes::Model model{.log = &log};
  fakes::Optimizer optimizer{model};
  fakes::Loss loss(double value) { return {value, &model}; }
};

}  // namespace

TEST_CASE("without policies, backward and update are a plain step") {
  Loop loop;
  CHECK(backward(loop.loss(3), 5));
  CHECK(update(loop.optimizer) == StepResult::applied);
  CHECK(loop.log == Log{"backward", "step", "zero_grad"});
  CHECK(loop.model.weight == -3);
}

TEST_CASE("without policies, a loss without weight is not backpropagated") {
  Loop loop;
  CHECK(!backward(loop.loss(std::numeric_limits<double>::quiet_NaN()), 0));
  CHECK(loop.log.empty());
}

TEST_CASE("the order of an update does not depend on the order of the policies") {
  const Log expected{"scale", "backward", "scale", "backward", "unscale", "clip", "fused", "step", "zero_grad"};
  {
    Loop loop;
    Precision precision{loop.log};
    Clip clip{loop.log};
    Fused fused{loop.log};
    GradAccumulator accumulator(2);
    CHECK(!backward(loop.loss(1), 1, precision, accumulator, clip, fused));
    CHECK(backward(loop.loss(1), 1, precision, accumulator, clip, fused));
    CHECK(update(loop.optimizer, precision, accumulator, clip, fused) == StepResult::applied);
    CHECK(loop.log == expected);
  }
  {
    Loop loop;
    Precision precision{loop.log};
    Clip clip{loop.log};
    Fused fused{loop.log};
    GradAccumulator accumulator(2);
    CHECK(!backward(loop.loss(1), 1, fused, clip, accumulator, precision));
    CHECK(backward(loop.loss(1), 1, accumulator, precision));
    CHECK(update(loop.optimizer, clip, fused, accumulator, precision) == StepResult::applied);
    CHECK(loop.log == expected);
  }
}

TEST_CASE("the window's factor reaches the precision policy") {
  Loop loop;
  Precision precision{loop.log};
  GradAccumulator accumulator(4);
  (void)backward(loop.loss(6), 2, accumulator, precision);
  update(loop.optimizer, accumulator, precision);
  CHECK(precision.factor == 4.0);
  CHECK(loop.optimizer.seen.back() == 6.0);
}

TEST_CASE("an uneven window is normalised without a precision policy too") {
  Loop loop;
  GradAccumulator accumulator(4);
  (void)backward(loop.loss(6), 2, accumulator);
  update(loop.optimizer, accumulator);
  CHECK(loop.optimizer.seen.back() == 6.0);
}

TEST_CASE("a skipped update closes the window and leaves the weights") {
  Loop loop;
  Precision precision{loop.log, /*overflow=*/true};
  GradAccumulator accumulator(1);
  (void)backward(loop.loss(6), 2, accumulator, precision);
  CHECK(update(loop.optimizer, accumulator, precision) == StepResult::skipped);
  CHECK(!accumulator.pending());
  CHECK(loop.model.weight == 0);
  CHECK(loop.model.gradient == 0);
}

TEST_CASE("an update that throws drops its window, and the precision policy hears of it") {
  Loop loop;
  Precision precision{loop.log};
  Clip clip{loop.log, /*throws=*/true};
  GradAccumulator accumulator(2);
  (void)backward(loop.loss(6), 2, accumulator, precision);
  CHECK_THROWS_WITH(update(loop.optimizer, accumulator, precision, clip), "clip");
  CHECK(precision.abandoned == 1);
  CHECK(!accumulator.pending());
  CHECK(loop.model.gradient == 0);
  clip.throws = false;
  CHECK(!backward(loop.loss(3), 2, accumulator, precision));
  CHECK(backward(loop.loss(3), 2, accumulator, precision));
  CHECK(update(loop.optimizer, accumulator, precision, clip) == StepResult::applied);
  CHECK(loop.optimizer.seen == std::vector<double>{3});
  CHECK(precision.abandoned == 1);
}

namespace users {
struct Value {};
int backward(const Value&, GradAccumulator&) { return 7; }
}  // namespace users

TEST_CASE("a user's own backward(loss, policy) is found before ours that asks for the weight") {
  users::Value loss;
  GradAccumulator accumulator(2);
  CHECK(backward(loss, accumulator) == 7);
}
