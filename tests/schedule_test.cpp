#include "support/catch.hpp"

#include <frugal/schedule.hpp>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numbers>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

// What LibTorch's optimizers look like to a schedule.
class FakeOptimizer {
 public:
  explicit FakeOptimizer(std::vector<double> rates) {
    for (double rate : rates) groups_.push_back(Group{{rate}});
  }
  struct Options {
    double rate;
    double get_lr() const { return rate; }
    void set_lr(double to) { rate = to; }
  };
  struct Group {
    Options all;
    Options& options() { return all; }
  };
  std::vector<Group>& param_groups() { return groups_; }
  double rate(std::size_t group = 0) { return groups_.at(group).all.rate; }
  void add(double rate) { groups_.push_back(Group{{rate}}); }

 private:
  std::vector<Group> groups_;
};

struct Archive {
  std::map<std::string, double> values;
  void write(const std::string& name, auto value) { values[name] = static_cast<double>(value); }
  void read(const std::string& name, auto& value) {
    value = static_cast<std::remove_reference_t<decltype(value)>>(values.at(name));
  }
  bool has(const std::string& name) const { return values.contains(name); }
};

std::optional<double> published_rate(const auto& policy) {
  Archive out;
  policy.readings(out);
  return out.has("rate") ? std::optional(out.values.at("rate")) : std::nullopt;
}

const double infinity = std::numeric_limits<double>::infinity();
const double not_a_number = std::numeric_limits<double>::quiet_NaN();

}  // namespace

static_assert(frugal::SchedulePolicy<frugal::Schedule, FakeOptimizer>);
static_assert(frugal::SchedulePolicy<frugal::ReduceOnPlateau, FakeOptimizer>);
static_assert(frugal::Stateful<frugal::Schedule> && frugal::Stateful<frugal::ReduceOnPlateau>);

TEST_CASE("rate functions take the values of their formulas", "[schedule]") {
  CHECK(frugal::constant()(7) == 1.0);
  CHECK(frugal::constant(0.25)(0) == 0.25);

  const auto cosine = frugal::cosine(100, 0.1);
  CHECK(cosine(0) == 1.0);
  CHECK(cosine(25) == Approx(0.1 + 0.9 * 0.5 * (1 + std::sqrt(0.5))));
  CHECK(cosine(50) == Approx(0.55));
  CHECK(cosine(100) == Approx(0.1));
  CHECK(cosine(1000) == Approx(0.1));
  CHECK(frugal::cosine(100)(100) == 0.0);

  const auto linear = frugal::linear(10, 0.5);
  CHECK(linear(0) == 1.0);
  CHECK(linear(4) == Approx(0.8));
  CHECK(linear(10) == 0.5);
  CHECK(linear(11) == 0.5);
  CHECK(frugal::linear(10)(10) == 0.0);

  const auto decay = frugal::step_decay(30, 0.1);
  CHECK(decay(29) == 1.0);
  CHECK(decay(30) == Approx(0.1));
  CHECK(decay(59) == Approx(0.1));
  CHECK(decay(60) == Approx(0.01));
}

TEST_CASE("a warm-up rises to what follows, which counts from its own step 0", "[schedule]") {
  const auto rate = frugal::warmup(4, frugal::cosine(100));
  CHECK(rate(0) == 0.25);
  CHECK(rate(1) == 0.5);
  CHECK(rate(3) == 1.0);
  CHECK(rate(4) == 1.0);
  CHECK(rate(54) == Approx(0.5));
  CHECK(rate(104) == 0.0);

  CHECK(frugal::warmup(2)(0) == 0.5);
  CHECK(frugal::warmup(2)(9) == 1.0);
  CHECK(frugal::warmup(2, frugal::constant(0.5))(0) == 0.25);
  CHECK(frugal::warmup(0, frugal::linear(10))(5) == 0.5);
  CHECK(frugal::warmup(2, frugal::warmup(2, frugal::linear(2)))(5) == Approx(0.5));

  const std::function<double(std::int64_t)> erased = rate;
  CHECK(frugal::warmup(1, erased)(1) == 0.25);
}

TEST_CASE("one_cycle follows torch's OneCycleLR", "[schedule]") {
  // torch.optim.lr_scheduler.OneCycleLR(max_lr=1, total_steps=10)
  const std::vector<double> expected{
      0.04,           0.52,           1.0,  0.950484632013, 0.811745653950, 0.611262021936, 0.388741978064,
      0.188258346050, 0.049519367986, 4e-06};
  const auto rate = frugal::one_cycle(10);
  for (std::size_t step = 0; step < expected.size(); ++step)
    CHECK(rate(static_cast<std::int64_t>(step)) == Approx(expected[step]).epsilon(1e-9));
  CHECK(rate(11) == Approx(4e-06));
  CHECK(frugal::one_cycle(10, {.start_divisor = 10})(0) == Approx(0.1));
  CHECK(frugal::one_cycle(10, {.end_divisor = 1})(9) == Approx(0.04));
}

TEST_CASE("rate functions of a single step, and before the first one, are finite", "[schedule]") {
  for (const std::function<double(std::int64_t)>& rate :
       {std::function<double(std::int64_t)>(frugal::cosine(1)), std::function<double(std::int64_t)>(frugal::linear(1)),
        std::function<double(std::int64_t)>(frugal::one_cycle(1)),
        std::function<double(std::int64_t)>(frugal::one_cycle(5, {.peak_at = 0})),
        std::function<double(std::int64_t)>(frugal::one_cycle(5, {.peak_at = 1})),
        std::function<double(std::int64_t)>(frugal::step_decay(1)),
        std::function<double(std::int64_t)>(frugal::warmup(1))}) {
    for (std::int64_t step = -3; step < 12; ++step) {
      CHECK(std::isfinite(rate(step)));
      CHECK(rate(step) >= 0);
    }
    CHECK(rate(-3) == rate(0));
    CHECK(rate(0) > 0);
  }
}

TEST_CASE("rate functions reject arguments that mean nothing", "[schedule]") {
  CHECK_THROWS_AS(frugal::cosine(0), std::invalid_argument);
  CHECK_THROWS_AS(frugal::cosine(10, -0.1), std::invalid_argument);
  CHECK_THROWS_AS(frugal::linear(0), std::invalid_argument);
  CHECK_THROWS_AS(frugal::linear(10, not_a_number), std::invalid_argument);
  CHECK_THROWS_AS(frugal::step_decay(0), std::invalid_argument);
  CHECK_THROWS_AS(frugal::step_decay(10, infinity), std::invalid_argument);
  CHECK_THROWS_AS(frugal::one_cycle(0), std::invalid_argument);
  CHECK_THROWS_AS(frugal::one_cycle(10, {.peak_at = 1.5}), std::invalid_argument);
  CHECK_THROWS_AS(frugal::one_cycle(10, {.start_divisor = 0}), std::invalid_argument);
  CHECK_THROWS_AS(frugal::warmup(-1), std::invalid_argument);
  CHECK_THROWS_AS(frugal::constant(-1), std::invalid_argument);
  CHECK_THROWS_WITH(frugal::cosine(0), ContainsSubstring("cosine: the number of steps is below 1"));
}

TEST_CASE("a schedule multiplies the rates that it first saw, and never compounds", "[schedule]") {
  FakeOptimizer optimizer({0.1, 0.01});
  frugal::Schedule schedule(frugal::step_decay(1, 0.5));
  CHECK_FALSE(published_rate(schedule));

  schedule.apply(optimizer, 0);
  CHECK(optimizer.rate(0) == 0.1);
  schedule.apply(optimizer, 1);
  schedule.apply(optimizer, 1);
  CHECK(optimizer.rate(0) == 0.05);
  CHECK(optimizer.rate(1) == 0.005);
  CHECK(published_rate(schedule) == 0.05);
  schedule.apply(optimizer, 0);
  CHECK(optimizer.rate(0) == 0.1);
}

TEST_CASE("a parameter group that is added later gets its base rate at first sight", "[schedule]") {
  FakeOptimizer optimizer({0.1});
  frugal::Schedule schedule(frugal::step_decay(1, 0.5));
  schedule.apply(optimizer, 1);
  optimizer.add(0.4);
  schedule.apply(optimizer, 2);
  CHECK(optimizer.rate(0) == 0.025);
  CHECK(optimizer.rate(1) == 0.1);
}

TEST_CASE("a bad rate is an error that names the step and changes nothing", "[schedule]") {
  FakeOptimizer optimizer({0.1, 0.2});
  for (const double bad : {-1.0, not_a_number, infinity}) {
    frugal::Schedule schedule([&](std::int64_t step) { return step == 3 ? bad : 0.5; });
    schedule.apply(optimizer, 2);
    const double before = optimizer.rate(1);
    CHECK_THROWS_WITH(schedule.apply(optimizer, 3), ContainsSubstring("Schedule: the rate of step 3 is"));
    CHECK(optimizer.rate(0) == Approx(before / 2));
    CHECK(optimizer.rate(1) == before);
  }
  CHECK_THROWS_AS(frugal::Schedule(nullptr), std::invalid_argument);
}

TEST_CASE("base rates survive a checkpoint, whatever the rates of the resumed optimizer", "[schedule]") {
  FakeOptimizer optimizer({0.1});
  frugal::Schedule schedule(frugal::step_decay(1, 0.5));
  schedule.apply(optimizer, 3);
  Archive file;
  schedule.save(file);

  FakeOptimizer resumed({optimizer.rate()});  // its state holds the multiplied rate
  frugal::Schedule loaded(frugal::step_decay(1, 0.5));
  loaded.load(file);
  loaded.apply(resumed, 3);
  CHECK(resumed.rate() == optimizer.rate());
  loaded.apply(resumed, 0);
  CHECK(resumed.rate() == 0.1);
}

TEST_CASE("a state of another number of groups is an error before anything changes", "[schedule]") {
  FakeOptimizer two({0.1, 0.2});
  frugal::Schedule schedule(frugal::constant(0.5));
  schedule.apply(two, 0);
  Archive file;
  schedule.save(file);

  for (auto other : {FakeOptimizer({0.3}), FakeOptimizer({0.3, 0.3, 0.3})}) {
    frugal::Schedule loaded(frugal::constant(0.5));
    loaded.load(file);
    CHECK_THROWS_WITH(loaded.apply(other, 0), ContainsSubstring("base learning rates of 2 parameter groups"));
    CHECK(other.rate() == 0.3);
  }
  FakeOptimizer fewer({0.3});
  CHECK_THROWS_AS(schedule.apply(fewer, 0), std::invalid_argument);

  frugal::Schedule unused(frugal::constant()), again(frugal::constant());
  Archive empty;
  unused.save(empty);
  again.load(empty);
  CHECK_NOTHROW(again.apply(fewer, 0));
}

TEST_CASE("a new run keeps the base rates", "[schedule]") {
  FakeOptimizer optimizer({0.1});
  frugal::Schedule schedule(frugal::step_decay(1, 0.5));
  schedule.apply(optimizer, 4);
  schedule.reset();
  schedule.apply(optimizer, 0);
  CHECK(optimizer.rate() == 0.1);
}

TEST_CASE("ReduceOnPlateau follows torch's ReduceLROnPlateau", "[schedule]") {
  const auto rates = [](frugal::ReduceOnPlateauOptions options, const std::vector<double>& metrics) {
    FakeOptimizer optimizer({1.0});
    frugal::ReduceOnPlateau plateau(options);
    std::vector<double> found;
    for (double metric : metrics) {
      plateau.observe(metric);
      plateau.apply(optimizer, 0);
      found.push_back(optimizer.rate());
    }
    return found;
  };
  // what torch.optim.lr_scheduler.ReduceLROnPlateau sets for the same metrics
  CHECK(
      rates({.factor = 0.5, .patience = 1, .cooldown = 2},
            {3., 2., 2., 1.9999, 2., 2., 2.5, 2., 2., 2., 1., 1.05, 1.2, 1.2, 1.2, 1.2, 1.2}) ==
      std::vector{1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125, 0.0625});
  CHECK(rates({.factor = 0.5,
               .patience = 1,
               .min_delta = 0.1,
               .relative = false,
               .goal = frugal::Goal::maximize,
               .min_rate = 0.2},
              {1., 1.5, 1.55, 1.5, 1.6, 1.62, 1.8, 1.85, 1.85, 1.85, 1.85, 1.85, 1.85}) ==
        std::vector{1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2, 0.2});
}

TEST_CASE("a reduction takes effect at the next apply and multiplies the base", "[schedule]") {
  FakeOptimizer optimizer({0.4, 0.8});
  frugal::ReduceOnPlateau plateau({.factor = 0.5, .patience = 0});
  plateau.apply(optimizer, 0);
  plateau.observe(1.0);
  plateau.observe(1.0);
  CHECK(optimizer.rate(0) == 0.4);
  plateau.apply(optimizer, 1);
  plateau.apply(optimizer, 2);
  CHECK(optimizer.rate(0) == 0.2);
  CHECK(optimizer.rate(1) == 0.4);
  CHECK(published_rate(plateau) == 0.2);
  plateau.observe(1.0);
  CHECK(plateau.multiplier() == 0.25);
}

TEST_CASE("a metric that is not finite is a bad check and never the best one", "[schedule]") {
  frugal::ReduceOnPlateau plateau({.factor = 0.5, .patience = 1});
  plateau.observe(-infinity);
  plateau.observe(not_a_number);
  CHECK(plateau.multiplier() == 0.5);
  plateau.observe(1e9);
  plateau.observe(1e8);
  plateau.observe(not_a_number);
  CHECK(plateau.multiplier() == 0.5);
  plateau.observe(infinity);
  CHECK(plateau.multiplier() == 0.25);
}

TEST_CASE("ReduceOnPlateau resumes where it was, and starts anew at the full rates", "[schedule]") {
  const frugal::ReduceOnPlateauOptions options{.factor = 0.5, .patience = 2, .cooldown = 1};
  const std::vector<double> metrics{3, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1};
  for (std::size_t cut = 0; cut <= metrics.size(); ++cut) {
    FakeOptimizer whole({1.0}), resumed({1.0});
    frugal::ReduceOnPlateau never_stopped(options), first(options), second(options);
    for (std::size_t i = 0; i < metrics.size(); ++i) {
      never_stopped.observe(metrics[i]), never_stopped.apply(whole, 0);
      if (i == cut) {
        Archive file;
        first.save(file);
        second.load(file);
      }
      auto& now = i < cut ? first : second;
      now.observe(metrics[i]), now.apply(resumed, 0);
      CHECK(resumed.rate() == whole.rate());
    }
    CHECK(whole.rate() < 0.3);
    never_stopped.reset();
    never_stopped.apply(whole, 0);
    CHECK(whole.rate() == 1.0);
  }
}

TEST_CASE("ReduceOnPlateau can be switched off and rejects options that mean nothing", "[schedule]") {
  frugal::ReduceOnPlateau off({.factor = 1, .patience = 0});
  for (int i = 0; i < 50; ++i) off.observe(1.0);
  CHECK(off.multiplier() == 1.0);

  using Options = frugal::ReduceOnPlateauOptions;
  for (const Options& bad :
       {Options{.factor = 0}, Options{.factor = 1.5}, Options{.factor = not_a_number}, Options{.patience = -1},
        Options{.min_delta = -1}, Options{.cooldown = -1}, Options{.min_rate = 2}, Options{.min_rate = -1}})
    CHECK_THROWS_AS(frugal::ReduceOnPlateau(bad), std::invalid_argument);
}
