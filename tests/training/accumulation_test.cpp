// Accumulated gradients are those of the full batch, however the batch is cut.
#include "support/catch.hpp"
#include "training/network.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/trainer.hpp>
#include <frugal/update.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

using namespace frugal;
using namespace network;

namespace {

using Sizes = std::vector<std::int64_t>;

// Two optimizers: SGD's step is proportional to the gradient, so that a wrong factor shows; AdamW has state.
struct Trained {
  Net model = make(torch::kDouble);
  torch::optim::SGD optimizer = sgd(model->parameters());
  State state() { return state_of(*model); }
};

std::int64_t sum(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}); }

// Every window as one batch, by hand.
State full_batches(const std::vector<Sizes>& windows, std::int64_t epochs) {
  Trained reference;
  Sizes whole;
  for (const Sizes& window : windows) whole.push_back(sum(window));
  train_by_hand(reference.model, reference.optimizer, cut(data(sum(whole), torch::kDouble), whole), epochs);
  return reference.state();
}
std::vector<Batch> micro_batches(const std::vector<Sizes>& windows) {
  Sizes all;
  for (const Sizes& window : windows) all.insert(all.end(), window.begin(), window.end());
  return cut(data(sum(all), torch::kDouble), all);
}

constexpr double exact = 1e-12;  // double precision; a wrong weight is wrong by percents

}  // namespace

TEST_CASE("accumulated windows train like full batches") {
  struct Case {
    const char* name;
    std::int64_t steps;
    std::vector<Sizes> windows;
  };
  const auto [name, steps, windows] = GENERATE(values<Case>({
      {"even", 4, {{4, 4, 4, 4}, {4, 4, 4, 4}}},
      {"uneven", 3, {{5, 1, 3}, {2, 8, 2}}},
      {"short last window", 4, {{4, 4, 4, 4}, {4, 4}}},
      {"short and uneven last window", 3, {{4, 4, 4}, {4, 1}}},
      {"last micro-batch smaller", 2, {{8, 8}, {8, 3}}},
      {"no accumulation", 1, {{6}, {2}, {5}}},
  }));
  constexpr std::int64_t epochs = 3;
  const State expected = full_batches(windows, epochs);
  INFO(name);

  SECTION("by Trainer::fit") {
    Trained trained;
    Trainer trainer{trained.model, trained.optimizer, MeanLoss{}, GradAccumulator(steps)};
    const RunReport report = trainer.fit(micro_batches(windows), {.epochs = epochs});
    CHECK(distance(trained.state(), expected) < exact);
    CHECK(report.progress.step == epochs * static_cast<std::int64_t>(windows.size()));
  }
  SECTION("by Trainer::step and flush") {
    Trained trained;
    Trainer trainer{trained.model, trained.optimizer, MeanLoss{}, GradAccumulator(steps)};
    for (std::int64_t epoch = 0; epoch < epochs; ++epoch) {
      for (const Batch& batch : micro_batches(windows)) trainer.step(batch);
      trainer.flush();
      CHECK(trainer.flush() == StepResult::accumulated);  // nothing is left
    }
    CHECK(distance(trained.state(), expected) < exact);
  }
  SECTION("by backward and update") {
    Trained trained;
    GradAccumulator accumulator(steps);
    for (std::int64_t epoch = 0; epoch < epochs; ++epoch) {
      for (const Batch& batch : micro_batches(windows))
        if (frugal::backward(MeanLoss()(trained.model, batch), batch.size(), accumulator))
          frugal::update(trained.optimizer, accumulator);
      if (accumulator.pending()) frugal::update(trained.optimizer, accumulator);
    }
    CHECK(distance(trained.state(), expected) < exact);
  }
}

TEST_CASE("a carried window spans two epochs, and the end of training drops none") {
  const std::vector<Batch> epoch = micro_batches({{4, 4, 4}, {4, 2}});  // 5 micro-batches, windows of 3
  std::vector<Batch> flat;
  for (int i = 0; i < 2; ++i) flat.insert(flat.end(), epoch.begin(), epoch.end());
  Trained reference;
  for (const auto& [from, to] : {std::pair{0, 3}, {3, 6}, {6, 9}, {9, 10}}) {
    std::vector<torch::Tensor> inputs, targets;
    for (int i = from; i < to; ++i) {
      inputs.push_back(flat[static_cast<std::size_t>(i)].inputs);
      targets.push_back(flat[static_cast<std::size_t>(i)].targets);
    }
    const std::vector<Batch> window{{torch::cat(inputs), torch::cat(targets)}};
    train_by_hand(reference.model, reference.optimizer, window, 1);
  }

  Trained trained;
  Trainer trainer{trained.model, trained.optimizer, MeanLoss{},
                  GradAccumulator({.steps = 3, .at_epoch_end = AtEpochEnd::carry})};
  const RunReport report = trainer.fit(epoch, {.epochs = 2});
  CHECK(report.progress.step == 4);
  CHECK(distance(trained.state(), reference.state()) < exact);
}

namespace {

// A sequence with padding: the loss is a mean over the tokens that are none.
struct Tokens {
  torch::Tensor inputs, targets, mask;  // [sequences, length, 6], [sequences, length, 3], [sequences, length]
  std::int64_t size() const { return inputs.size(0); }
};
struct TokenLoss {
  Weighted<torch::Tensor> operator()(Net& model, const Tokens& batch) const {
    const torch::Tensor errors = (model(batch.inputs) - batch.targets).square().mean(-1);
    const torch::Tensor tokens = batch.mask.sum();
    return {(errors * batch.mask).sum() / tokens, tokens.item<std::int64_t>()};  // NaN without a token
  }
};
Tokens padded(const std::vector<std::int64_t>& lengths) {
  const auto count = static_cast<std::int64_t>(lengths.size());
  torch::manual_seed(3);
  const Data all = data(count * 5, torch::kDouble);
  torch::Tensor mask = torch::zeros({count, 5}, torch::kDouble);
  for (std::int64_t i = 0; i < count; ++i) mask[i].narrow(0, 0, lengths[static_cast<std::size_t>(i)]).fill_(1);
  return {all.inputs.view({count, 5, 6}), all.targets.view({count, 5, 3}), mask};
}
std::vector<Tokens> split(const Tokens& all, const Sizes& sizes) {
  std::vector<Tokens> parts;
  std::int64_t from = 0;
  for (const std::int64_t size : sizes) {
    parts.push_back(
        {all.inputs.narrow(0, from, size), all.targets.narrow(0, from, size), all.mask.narrow(0, from, size)});
    from += size;
  }
  return parts;
}

}  // namespace

TEST_CASE("windows weigh tokens, and padding contributes nothing") {
  const auto lengths = GENERATE(values<std::vector<std::int64_t>>({
      {5, 1, 2, 4, 3, 5},
      {5, 4, 0, 0, 1, 2},  // the second micro-batch is nothing but padding: its mean loss is NaN
      {0, 0, 3, 3, 0, 0},  // the window begins and ends with padding
  }));
  const Tokens all = padded(lengths);
  Trained reference;
  for (int i = 0; i < 3; ++i) {
    TokenLoss()(reference.model, all).loss.backward();
    reference.optimizer.step();
    reference.optimizer.zero_grad();
  }

  Trained trained;
  Trainer trainer{trained.model, trained.optimizer, TokenLoss{}, GradAccumulator(3)};
  const RunReport report = trainer.fit(split(all, {2, 2, 2}), {.epochs = 3});
  CHECK(distance(trained.state(), reference.state()) < exact);
  CHECK(report.progress.step == 3);
  CHECK(report.progress.samples == 18);  // samples, never tokens
}

TEST_CASE("a window of nothing but padding leaves weights and optimizer alone") {
  const Tokens nothing = padded({0, 0}), something = padded({3, 2});
  Trained reference, trained;
  Trainer expected{reference.model, reference.optimizer, TokenLoss{}};
  Trainer trainer{trained.model, trained.optimizer, TokenLoss{}, GradAccumulator(2)};
  const auto both = [&](const Tokens& batch) {
    expected.step(batch);
    for (const Tokens& part : split(batch, {1, 1})) trainer.step(part);
  };
  both(something), both(nothing), both(something);  // momentum goes on as if there had been no window
  CHECK(trainer.progress().step == 2);
  CHECK(trainer.progress().skipped == 0);
  CHECK(distance(trained.state(), reference.state()) < exact);
  CHECK(std::isfinite(trainer.progress().loss));
}

TEST_CASE("the reported loss is the weighted mean of the window") {
  const std::vector<Sizes> windows{{5, 1, 3}};
  Trained trained;
  const Data all = data(9, torch::kDouble);
  const double expected = MeanLoss()(trained.model, Batch{all.inputs, all.targets}).item<double>();
  Trainer trainer{trained.model, trained.optimizer, MeanLoss{}, GradAccumulator(3)};
  for (const Batch& batch : micro_batches(windows)) trainer.step(batch);
  CHECK(std::abs(trainer.progress().loss - expected) < exact);
}

TEST_CASE("a window starts without gradients from outside of it") {
  const std::vector<Sizes> windows{{4, 4}};
  const State expected = full_batches(windows, 1);
  Trained trained;
  MeanLoss()(trained.model, micro_batches(windows).front()).backward();  // a probe, before the training begins
  Trainer trainer{trained.model, trained.optimizer, MeanLoss{}, GradAccumulator(2)};
  trainer.fit(micro_batches(windows));
  CHECK(distance(trained.state(), expected) < exact);
}

TEST_CASE("a tied parameter that is listed twice, or in two groups, has one gradient") {
  for (const bool precise : {true, false})  // Gradients, or multiply_gradients
    for (const bool groups : {true, false}) {
      torch::nn::Linear model(2, 1);
      torch::optim::SGD optimizer(std::vector{model->weight}, 1.0);
      if (groups) optimizer.add_param_group(torch::optim::OptimizerParamGroup(std::vector{model->bias}));
      optimizer.param_groups().back().params().push_back(model->weight);
      GradAccumulator accumulator(4);
      const auto before = model->weight.detach().clone();
      (void)accumulator.backward(model(torch::ones({3, 2})).mean(), 3);
      AmpPolicy<Fp32> amp(torch::kCPU);
      // a window of 1 of 4: all gradients multiplied by 4, once
      precise ? update(optimizer, accumulator, amp) : update(optimizer, accumulator);
      // SGD steps it twice, as listed
      CHECK(model->weight.detach().sub(before).abs().max().item<double>() == Approx(2.0));
    }
}
