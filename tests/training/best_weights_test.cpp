// What a run leaves in the model: the best weights, bit for bit and buffers included, on every way out.
#include "support/catch.hpp"
#include "training/network.hpp"

#include <frugal/averager.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/observers.hpp>
#include <frugal/trainer.hpp>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace frugal;
using namespace network;

namespace {

const std::vector<std::int64_t> sizes{8, 8, 8, 5};

// Validations with given results; remembers the model at each of them.
struct Checks {
  NormedNet& model;
  std::vector<double> metrics;
  std::vector<State> seen = {};
  double operator()() {
    seen.push_back(state_of(*model));
    return metrics.at(seen.size() - 1);
  }
};

struct Run {
  NormedNet model = make<NormedNet>();
  torch::optim::AdamW optimizer = adamw(model->parameters());
  std::vector<Batch> batches = cut(data(29), sizes);
  Checks checks{model, {}};
  State state() { return state_of(*model); }
};

}  // namespace

TEST_CASE("the best weights come back bit for bit, batch norm's buffers included") {
  Run run;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  StopReason expected = StopReason::plateau;
  std::size_t best = 1;
  EarlyStopperOptions options{.patience = 2};
  std::int64_t epochs = 0;
  SECTION("a plateau") { run.checks.metrics = {3, 1, 2, 1.5}; }
  SECTION("ties keep the older") { run.checks.metrics = {3, 1, 1, 1}; }
  SECTION("a metric that is no number is never the best") { run.checks.metrics = {nan, 1, nan, nan}; }
  SECTION("higher is better") {
    run.checks.metrics = {0.5, 0.9, 0.7, 0.8};
    options.goal = Goal::maximize;
  }
  SECTION("the check that stops is the best one") {
    run.checks.metrics = {3, 1, 0.2};
    options.target = 0.25;
    expected = StopReason::target_reached, best = 2;
  }
  SECTION("the epochs are over") {
    run.checks.metrics = {3, 1, 2};
    epochs = 3, expected = StopReason::finished;
  }
  SECTION("diverged") {
    run.checks.metrics = {3, 1, 50};
    options.diverged_at = 10;
    expected = StopReason::diverged;
  }
  Trainer trainer{run.model, run.optimizer, MeanLoss{}, EarlyStopper(options)};
  const RunReport report = trainer.fit(run.batches, run.checks, {.epochs = epochs});
  CHECK(report.reason == expected);
  CHECK(run.checks.seen.size() == run.checks.metrics.size());
  CHECK(report.best_metric == run.checks.metrics[best]);
  CHECK(same_bits(run.state(), run.checks.seen[best]));
  CHECK(run.model->is_training());
  if (best + 1 < run.checks.seen.size()) CHECK_FALSE(same_bits(run.checks.seen[best], run.checks.seen.back()));
}

TEST_CASE("a fit() that finds a run over leaves weights alone that the user set since") {
  Run run;
  run.checks.metrics = {3, 1, 2, 4};
  Trainer trainer{run.model, run.optimizer, MeanLoss{}, EarlyStopper({.patience = 9})};
  trainer.fit(run.batches, run.checks, {.epochs = 4});
  CHECK(same_bits(run.state(), run.checks.seen[1]));
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : run.model->parameters()) parameter.fill_(0.5);
  }
  const State set = run.state();
  trainer.fit(run.batches, run.checks, {.epochs = 4});
  CHECK(same_bits(run.state(), set));
  CHECK(trainer.restore_best());
  CHECK(same_bits(run.state(), run.checks.seen[1]));
}

TEST_CASE("without restore_best the last weights stay") {
  Run run;
  run.checks.metrics = {3, 1, 2, 1.5};
  Trainer trainer{run.model, run.optimizer, MeanLoss{}, EarlyStopper({.patience = 2, .restore_best = false})};
  trainer.fit(run.batches, run.checks, {.epochs = 0});
  CHECK(same_bits(run.state(), run.checks.seen.back()));
}

TEST_CASE("an exception leaves the best weights behind, and is not hidden by them") {
  Run run;
  run.checks.metrics = {3, 1, 2, 1.5, 1.2};
  std::int64_t micro_batches = 0;
  const auto message = [&](auto&& loss, auto&& validate, auto... observers) -> std::string {
    Trainer trainer{run.model, run.optimizer, std::forward<decltype(loss)>(loss), EarlyStopper({.patience = 9}),
                    std::move(observers)...};
    try {
      trainer.fit(run.batches, validate, {.epochs = 9});
    } catch (const std::runtime_error& error) { return error.what(); }
    return "nothing was thrown";
  };
  const auto plain = [&](NormedNet& model, const Batch& batch) { return MeanLoss()(model, batch); };

  SECTION("of validate") {
    const auto validate = [&] {
      if (run.checks.seen.size() == 3) throw std::runtime_error("disk full");
      return run.checks();
    };
    CHECK(message(plain, validate) == "disk full");
  }
  SECTION("of an observer, in a step") {
    const auto throws = [](const Progress& at) {
      if (at.step == 14) throw std::runtime_error("observer");
    };
    CHECK(message(plain, run.checks, OnStep{throws}) == "observer");
  }
  SECTION("of an observer, at the end of an epoch") {
    const auto throws = [](const Progress& at) {
      if (at.epoch == 3) throw std::runtime_error("epoch");
    };
    CHECK(message(plain, run.checks, OnEpoch{throws}) == "epoch");
  }
  SECTION("of the loss") {
    const auto loss = [&](NormedNet& model, const Batch& batch) {
      if (++micro_batches == 14) throw std::runtime_error("shape");
      return MeanLoss()(model, batch);
    };
    CHECK(message(loss, run.checks) == "shape");
  }
  REQUIRE(run.checks.seen.size() >= 3);
  CHECK(same_bits(run.state(), run.checks.seen[1]));
  CHECK(run.model->is_training());
}

TEST_CASE("a new stage forgets the best weights of the one before") {
  Run run;
  run.checks.metrics = {3, 1, 2, 8, 9};
  Trainer trainer{run.model, run.optimizer, MeanLoss{}, EarlyStopper({.patience = 9})};
  trainer.fit(run.batches, run.checks, {.epochs = 3});
  CHECK(same_bits(run.state(), run.checks.seen[1]));
  trainer.get<EarlyStopper>().new_stage();
  trainer.fit(run.batches, run.checks, {.epochs = 5});
  CHECK(same_bits(run.state(), run.checks.seen[3]));  // the metrics of two stages are not comparable
}

TEST_CASE("check keeps and restores the best weights in a loop by hand") {
  Run run;
  Trainer trainer{run.model, run.optimizer, MeanLoss{}, EarlyStopper({.patience = 9})};
  CHECK_FALSE(trainer.restore_best());
  run.checks.metrics = {3, 1, 2};
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (const Batch& batch : run.batches) trainer.step(batch);
    CHECK(trainer.check(run.checks()) == StopReason::none);
  }
  CHECK(trainer.restore_best());
  CHECK(same_bits(run.state(), run.checks.seen[1]));
}

namespace {

// The loop by hand with a moving average of its parameters, in LibTorch's own arithmetic.
struct ByHand {
  NormedNet model = make<NormedNet>();
  torch::optim::AdamW optimizer = adamw(model->parameters());
  std::vector<State> weights, averages = {};  // at the end of every epoch

  explicit ByHand(std::int64_t epochs, double decay) {
    State average;
    for (std::int64_t epoch = 0; epoch < epochs; ++epoch) {
      for (const Batch& batch : cut(data(29), sizes)) {
        train_by_hand(model, optimizer, std::vector{batch}, 1);
        if (average.empty()) average = state_of(*model);
        else
          for (std::size_t i = 0; i < model->parameters().size(); ++i)
            average[i].second.lerp_(model->parameters()[i].detach(), 1 - decay);
      }
      weights.push_back(state_of(*model));
      State now;
      for (const auto& [name, value] : average) now.emplace_back(name, value.clone());
      for (std::size_t i = model->parameters().size(); i < now.size(); ++i)
        now[i] = weights.back()[i];  // buffers: as they are
      averages.push_back(now);
    }
  }
};

}  // namespace

TEST_CASE("the average is validated, the training goes on from its own weights, and the average is what is left") {
  const ByHand expected(4, 0.9);
  Run run;
  run.checks.metrics = {3, 1, 2, 4};
  const AveragerOptions options{.decay = 0.9, .ramp = DecayRamp::none};
  std::vector<State> in_training;  // after the validation: what the next step starts from
  const auto remember = OnEpoch{[&](const Progress&) { in_training.push_back(state_of(*run.model)); }};

  SECTION("alone: the last average stays") {
    Trainer trainer{run.model, run.optimizer, MeanLoss{}, Averager(options), remember};
    trainer.fit(run.batches, run.checks, {.epochs = 4});
    CHECK(distance(run.state(), expected.averages[3]) < 1e-6);
  }
  SECTION("with a stopper: the best average comes back") {
    Trainer trainer{run.model, run.optimizer, MeanLoss{}, Averager(options), EarlyStopper({.patience = 9}), remember};
    trainer.fit(run.batches, run.checks, {.epochs = 4});
    CHECK(same_bits(run.state(), run.checks.seen[1]));
  }
  SECTION("in two calls: the second goes on from the trained weights") {
    Trainer trainer{run.model, run.optimizer, MeanLoss{}, Averager(options), remember};
    trainer.fit(run.batches, run.checks, {.epochs = 2});
    CHECK(distance(run.state(), expected.averages[1]) < 1e-6);
    trainer.fit(run.batches, run.checks, {.epochs = 4});
    CHECK(distance(run.state(), expected.averages[3]) < 1e-6);
  }
  REQUIRE(run.checks.seen.size() == 4);
  REQUIRE(in_training.size() == 4);
  for (std::size_t epoch = 0; epoch < 4; ++epoch) {
    CHECK(distance(run.checks.seen[epoch], expected.averages[epoch]) < 1e-6);
    CHECK(distance(run.checks.seen[epoch], expected.weights[epoch]) > 1e-4);  // which is something else
    CHECK(same_bits(in_training[epoch], expected.weights[epoch]));            // the exact swap back
  }
}

TEST_CASE("a validation under averaged weights that throws leaves the average, and training mode") {
  const ByHand expected(2, 0.9);
  Run run;
  run.checks.metrics = {3};
  Trainer trainer{run.model, run.optimizer, MeanLoss{}, Averager({.decay = 0.9, .ramp = DecayRamp::none})};
  const auto validate = [&] {
    if (run.checks.seen.size() == 1) throw std::runtime_error("out of memory");
    return run.checks();
  };
  CHECK_THROWS_WITH(trainer.fit(run.batches, validate, {.epochs = 4}), "out of memory");
  CHECK(distance(run.state(), expected.averages[1]) < 1e-6);
  CHECK_FALSE(run.model->norm->is_training() == false);
}
