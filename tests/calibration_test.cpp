#include "support/catch.hpp"
#include "support/caught_warnings.hpp"
#include "support/operators.hpp"
#include "support/temporary_directory.hpp"

#include <frugal/batches.hpp>
#include <frugal/calibration.hpp>
#include <frugal/checkpoint_manager.hpp>
#include <frugal/detail/duels.hpp>
#include <frugal/fused_step.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/grad_clip.hpp>
#include <frugal/testing.hpp>
#include <frugal/trainer.hpp>

#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using frugal::AmpPolicy;
using frugal::Attention;
using frugal::Precision;
using frugal::WeightCasts;

namespace {

const frugal::Capability able_cpu{.device = at::kCPU, .cpu_bf16 = true};

AmpPolicy<> automatic() { return AmpPolicy<>(at::kCPU, able_cpu); }

struct Attending : torch::nn::Module {
  Attending() { mix = register_module("mix", torch::nn::Linear(8, 24)); }
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = mix(x).view({2, 4, 3, 2, 4}).permute({2, 0, 3, 1, 4});
    return torch::scaled_dot_product_attention(parts[0], parts[1], parts[2]).sum();
  }
  torch::nn::Linear mix = nullptr;
};

// Time as the policy makes it: a step costs what the table says.
struct FakeHardware {
  frugal::testing::FakeClock clock;
  std::map<std::string, int> milliseconds;

  void work(const AmpPolicy<>& amp) {
    clock.advance(std::chrono::milliseconds(milliseconds.at(amp.chosen().now().text())));
  }
  frugal::CalibrationOptions options() const { return {.rounds = 3, .clock = clock}; }
};

struct Plain {
  torch::nn::Linear model{4, 4};
  torch::optim::SGD optimizer{model->parameters(), 0.1};
  at::Tensor input = torch::ones({2, 4});

  void step(AmpPolicy<>& amp, int micro_batches = 1) {
    for (int i = 0; i < micro_batches; ++i) {
      const auto loss = [&] {
        auto guard = amp.autocast();
        return model(input).sum();
      }();
      amp.scale(loss).backward();
    }
    amp.step(optimizer);
    optimizer.zero_grad();
  }
};

std::vector<std::string> names(const frugal::Calibration& found) {
  std::vector<std::string> all;
  for (const auto& way : found.ways)
    all.push_back(std::string(frugal::name_of(way.precision)) + (way.attention == Attention::fp32 ? "+attention" : "") +
                  (way.weight_casts == WeightCasts::per_step ? "+casts" : ""));
  return all;
}

}  // namespace

TEST_CASE("calibrate: the fastest way is taken, and a way must be faster by the margin") {
  Plain plain;
  const auto chosen = [&](int fp32, int bf16, double margin = 0.02) {
    FakeHardware hardware{.clock = {}, .milliseconds = {{"fp32", fp32}, {"bf16", bf16}}};
    hardware.milliseconds["bf16, attention in fp32, weights cast once per step"] = bf16;
    auto amp = automatic();
    auto options = hardware.options();
    options.margin = margin;
    const auto found =
        frugal::calibrate(amp, plain.model, plain.optimizer, [&] { plain.step(amp), hardware.work(amp); }, options);
    CHECK(names(found) == std::vector<std::string>{"fp32", "bf16"});  // no attention, every weight used once a step
    CHECK(found.ways[found.chosen].precision == amp.precision());
    CHECK(found.reason == amp.reason());
    return amp.precision();
  };
  CHECK(chosen(100, 50) == Precision::bf16);
  CHECK(chosen(50, 100) == Precision::fp32);
  CHECK(chosen(100, 99) == Precision::fp32);
  CHECK(chosen(100, 97) == Precision::bf16);
  CHECK(chosen(100, 97, 0.05) == Precision::fp32);
}

TEST_CASE("calibrate: the reason gives the figures") {
  Plain plain;
  FakeHardware hardware{.clock = {},
                        .milliseconds = {{"fp32", 100}, {"bf16", 50}, {"bf16, weights cast once per step", 40}}};
  hardware.milliseconds["bf16, attention in fp32, weights cast once per step"] = 40;
  auto amp = automatic();
  const auto step = [&] { plain.step(amp, 2), hardware.work(amp); };
  const auto found = frugal::calibrate(amp, plain.model, plain.optimizer, step, hardware.options());
  CHECK(names(found) == std::vector<std::string>{"fp32", "bf16", "bf16+casts"});
  CHECK(amp.reason() ==
        "bf16, weights cast once per step: 2.50x as fast as fp32 [2.50x, 2.50x], measured in 3 rounds; bf16 2.00x.");
  CHECK(found.ways[2].ratio == Approx(2.5));

  hardware.milliseconds["fp32"] = 10;
  auto other = automatic();
  const auto slow = [&] { plain.step(other, 2), hardware.work(other); };
  frugal::calibrate(other, plain.model, plain.optimizer, slow, hardware.options());
  CHECK(other.reason() ==
        "fp32, the fastest, measured in 3 rounds; bf16 0.20x; bf16, weights cast once per step 0.25x.");
}

TEST_CASE("calibrate: attention in fp32 is tried where a model has attention") {
  Attending model;
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  FakeHardware hardware{.clock = {}, .milliseconds = {{"fp32", 100}, {"bf16", 120}, {"bf16, attention in fp32", 70}}};
  hardware.milliseconds["bf16, attention in fp32, weights cast once per step"] = 70;
  auto amp = automatic();
  const auto input = torch::randn({2, 4, 8});
  const auto step = [&] {
    const auto loss = [&] {
      auto guard = amp.autocast();
      return model.forward(input);
    }();
    amp.scale(loss).backward();
    amp.step(optimizer);
    optimizer.zero_grad();
    hardware.work(amp);
  };
  const auto found = frugal::calibrate(amp, model, optimizer, step, hardware.options());
  CHECK(names(found) == std::vector<std::string>{"fp32", "bf16", "bf16+attention"});
  CHECK(amp.chosen().now().text() == "bf16, attention in fp32");
}

TEST_CASE("calibrate: what is asked for in code stays") {
  Plain plain;
  int steps = 0;
  const auto calibrated = [&](auto amp) {
    frugal::calibrate(amp, plain.model, plain.optimizer, [&] {
      ++steps;
      auto guard = amp.autocast();
      plain.model(plain.input).sum().backward();
    });
    return amp.precision();
  };
  CHECK(calibrated(AmpPolicy<frugal::Fp32>(at::kCPU, able_cpu)) == Precision::fp32);
  CHECK(calibrated(AmpPolicy<>(at::kCPU, able_cpu, {.precision = Precision::fp32})) == Precision::fp32);
  CHECK(calibrated(AmpPolicy<>(at::kCPU, frugal::Capability{.device = at::kCPU})) == Precision::fp32);
  CHECK(steps == 0);  // nothing to choose
  CHECK(calibrated(AmpPolicy<frugal::Bf16>(at::kCPU, able_cpu)) == Precision::bf16);
  CHECK(steps > 0);
}

TEST_CASE("calibrate: leaves no trace but the choice, also when a step throws") {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8), torch::nn::Dropout(0.5),
                              torch::nn::Linear(8, 2));
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);
  auto amp = automatic();
  const auto input = torch::randn({8, 4});
  int left = 1 << 20;
  const auto step = [&] {
    if (left-- == 0) throw std::runtime_error("enough");
    const auto loss = [&] {
      auto guard = amp.autocast();
      return model->forward(input).sum();
    }();
    amp.scale(loss).backward();
    amp.step(optimizer);
    optimizer.zero_grad();
  };
  step();
  model->eval();
  std::vector<at::Tensor> before;
  for (const auto& tensor : model->parameters()) before.push_back(tensor.detach().clone());
  for (const auto& tensor : model->buffers()) before.push_back(tensor.clone());
  const auto random = torch::randn({4});
  torch::manual_seed(11);
  const auto drawn = torch::randn({4});
  torch::manual_seed(11);
  const auto unchanged = [&] {
    std::size_t i = 0;
    for (const auto& tensor : model->parameters()) CHECK(tensor.equal(before[i++]));
    for (const auto& tensor : model->buffers()) CHECK(tensor.equal(before[i++]));
    for (const auto& parameter : model->parameters()) CHECK_FALSE(parameter.grad().defined());
    for (const auto& parameter : model->parameters()) {
      const auto& state = *optimizer.state().at(parameter.unsafeGetTensorImpl());
      CHECK(static_cast<const torch::optim::AdamWParamState&>(state).step() == 1);
    }
    CHECK_FALSE(model->is_training());
    CHECK(torch::randn({4}).equal(drawn));
    torch::manual_seed(11);
  };
  frugal::calibrate(amp, model, optimizer, step, {.rounds = 3, .turn = 0});
  unchanged();
  const auto kept = amp.reason();
  left = 5;
  CHECK_THROWS_WITH(frugal::calibrate(amp, model, optimizer, step, {.rounds = 3, .turn = 0}), "enough");
  unchanged();
  CHECK(amp.reason() == kept);
}

TEST_CASE("calibrate: the choice is in the checkpoint, and a policy that may takes it up") {
  Plain plain;
  FakeHardware hardware{.clock = {}, .milliseconds = {{"fp32", 10}, {"bf16", 50}}};
  hardware.milliseconds["bf16, attention in fp32, weights cast once per step"] = 40;
  auto amp = automatic();
  frugal::calibrate(
      amp, plain.model, plain.optimizer, [&] { plain.step(amp), hardware.work(amp); }, hardware.options());
  REQUIRE(amp.precision() == Precision::fp32);
  frugal::detail::Snapshot state;
  amp.save(state);
  auto resumed = automatic();
  REQUIRE(resumed.precision() == Precision::bf16);
  resumed.load(state);
  CHECK(resumed.precision() == Precision::fp32);
  CHECK(resumed.reason() == amp.reason());

  AmpPolicy<> fixed(at::kCPU, able_cpu, {.precision = Precision::bf16});  // code wins
  fixed.load(state);
  CHECK(fixed.precision() == Precision::bf16);
  CHECK(fixed.reason() == "bf16, asked for in code.");
}

TEST_CASE("calibrate: what was measured outlives a run that may not compute so") {
  auto amp = automatic();
  const frugal::detail::PrecisionChoice measured{Precision::bf16, "bf16, attention in fp32: measured.",
                                                 Attention::fp32};
  amp.become(measured, frugal::detail::Chosen::by_measuring);
  frugal::detail::Snapshot first, second;
  amp.save(first);
  AmpPolicy<> full(at::kCPU, able_cpu, {.precision = Precision::fp32});
  {
    const CaughtWarnings warnings;
    full.load(first);
  }
  CHECK(full.precision() == Precision::fp32);
  full.save(second);
  auto resumed = automatic();
  {
    const CaughtWarnings warnings;
    resumed.load(second);
  }
  CHECK(resumed.chosen().now().same_as(measured));
  CHECK(resumed.reason() == measured.reason);
}

TEST_CASE("calibrate: a step without a region is refused, and a model that has one way is told so") {
  torch::nn::Linear model(4, 4);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto input = torch::ones({2, 4});
  SECTION("no region") {
    auto amp = automatic();
    CHECK_THROWS_WITH(frugal::calibrate(amp, model, optimizer, [&] { model->forward(input).sum().backward(); }),
                      ContainsSubstring("never entered `amp.autocast()`"));
  }
  SECTION("one way") {
    AmpPolicy<frugal::Bf16> amp(at::kCPU, able_cpu);
    const auto found = frugal::calibrate(amp, model, optimizer, [&] {
      auto guard = amp.autocast();
      static_cast<void>(model->forward(input));
    });
    CHECK(found.ways.size() == 1);
    CHECK_THAT(found.reason, ContainsSubstring("all that this step has a use for"));
  }
}

TEST_CASE("calibrate: options that make no sense are refused") {
  Plain plain;
  auto amp = automatic();
  const auto refused = [&](frugal::CalibrationOptions options) {
    CHECK_THROWS_WITH(frugal::calibrate(
                          amp, plain.model, plain.optimizer, [] {}, options),
                      ContainsSubstring("calibrate: margin is"));
  };
  refused({.margin = -0.1});
  refused({.margin = 1});
  refused({.rounds = 2});
  refused({.turn = -1});
}

TEST_CASE("Trainer: calibrate measures whole windows and books nothing") {
  torch::nn::Linear model(4, 2);
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);
  const auto start = model->weight.detach().clone();
  int forwards = 0;
  const auto loss = [&](torch::nn::Linear& net, const frugal::Batch& batch) {
    ++forwards;
    return net(batch.inputs).square().mean();
  };
  frugal::Trainer trainer{
      model, optimizer, loss, automatic(), frugal::GradAccumulator(3), frugal::FusedStep{}, frugal::GradClip(1.0)};
  const frugal::Batch batch{torch::randn({8, 4}), torch::zeros({8})};
  model->eval();
  const auto found = trainer.calibrate(batch, frugal::CalibrationOptions{.rounds = 3, .turn = 0});
  CHECK(found.ways.size() == 3);  // a window of 3 uses a weight more than once
  CHECK(forwards > 0);
  CHECK(forwards % 3 == 0);
  CHECK(trainer.progress().step == 0);
  CHECK(trainer.progress().samples == 0);
  CHECK(model->weight.equal(start));
  CHECK_FALSE(model->is_training());
  CHECK(trainer.get<AmpPolicy<>>().reason() == found.reason);
  CHECK(trainer.get<frugal::FusedStep>().reason() == "no step yet");
  CHECK(std::isnan(trainer.get<frugal::GradClip>().norm()));
  trainer.step(batch);
  CHECK_THROWS_WITH(trainer.calibrate(batch), ContainsSubstring("inside a window"));
  const frugal::Batch empty{torch::zeros({0, 4}), torch::zeros({0})};
  trainer.flush();
  CHECK_THROWS_WITH(trainer.calibrate(empty), ContainsSubstring("without a sample"));
  trainer.step(empty);  // counts towards the window, before a calibration and after
  static_cast<void>(trainer.calibrate(batch, frugal::CalibrationOptions{.rounds = 3, .turn = 0}));
  CHECK(trainer.step(batch) == frugal::StepResult::accumulated);
  CHECK(trainer.step(batch) == frugal::StepResult::applied);
}

TEST_CASE("Trainer: a resumed run computes as the interrupted one was calibrated to") {
  const TemporaryDirectory directory;
  const frugal::Batch batch{torch::randn({8, 4}), torch::zeros({8})};
  const auto loss = [](torch::nn::Linear& net, const frugal::Batch& now) { return net(now.inputs).square().mean(); };
  const auto trained = [&](auto&& calibrated) {
    torch::nn::Linear model(4, 2);
    torch::optim::SGD optimizer(model->parameters(), 1e-2);
    frugal::Trainer trainer{model, optimizer, loss, automatic(),
                            frugal::CheckpointManager({.directory = directory.path()})};
    calibrated(trainer, trainer.template get<AmpPolicy<>>());
    trainer.step(batch);
    trainer.save();
    return trainer.template get<AmpPolicy<>>().reason();
  };
  const auto first = trained([&](auto& trainer, const AmpPolicy<>& amp) {
    FakeHardware hardware{.clock = {}, .milliseconds = {{"fp32", 10}, {"bf16", 50}}};
    hardware.milliseconds["bf16, attention in fp32, weights cast once per step"] = 50;
    auto options = hardware.options();
    options.clock = [&, clock = hardware.clock]() mutable {  // time passes when somebody looks, by precision
      clock.advance(std::chrono::milliseconds(hardware.milliseconds.at(amp.chosen().now().text())));
      return clock();
    };
    trainer.calibrate(batch, options);
    CHECK(amp.precision() == Precision::fp32);
  });
  const auto second = trained([](auto& trainer, const AmpPolicy<>& amp) {
    CHECK(amp.precision() == Precision::bf16);
    REQUIRE(trainer.resume());
    CHECK(amp.precision() == Precision::fp32);
  });
  CHECK(first == second);
}

TEST_CASE("calibrate: a first one that throws leaves the choice as it was") {
  Plain plain;
  auto amp = automatic();
  const auto before = amp.chosen().now();
  for (const int good : {0, 1, 5}) {
    int left = good;
    const auto step = [&] {
      if (left-- == 0) throw std::runtime_error("enough");
      plain.step(amp);
    };
    CHECK_THROWS_WITH(frugal::calibrate(amp, plain.model, plain.optimizer, step, {.rounds = 3, .turn = 0}), "enough");
    CHECK(amp.chosen().now().same_as(before));
    CHECK(amp.reason() == before.reason);
    CHECK(amp.chosen().how() == frugal::detail::Chosen::by_rule);
  }
}

TEST_CASE("calibrate: the loss scale of its steps is gone, also where there was none before") {
  Plain plain;
  AmpPolicy<> amp(at::kCPU, frugal::Capability{.device = at::kCPU, .cpu_fp16 = true},
                  {.scaler = {.init_scale = 4, .growth_interval = 1}, .precision = Precision::fp16});
  const bool scales = GENERATE(true, false);
  if (!scales) amp.become({Precision::fp32, "fp32, for now."}, frugal::detail::Chosen::by_rule);
  frugal::calibrate(amp, plain.model, plain.optimizer, [&] { plain.step(amp); }, {.rounds = 3, .turn = 0});
  REQUIRE(amp.precision() == Precision::fp16);
  CHECK(amp.scale_factor() == 4);
}

TEST_CASE("calibrate: what a run could not take up goes with the next state that it loads") {
  auto amp = automatic();
  frugal::detail::Snapshot ruled, measured, saved;
  amp.save(ruled);
  amp.become({Precision::bf16, "bf16: measured."}, frugal::detail::Chosen::by_measuring);
  amp.save(measured);
  AmpPolicy<> full(at::kCPU, able_cpu, {.precision = Precision::fp32});
  const CaughtWarnings warnings;
  full.load(measured);
  full.load(ruled);
  full.save(saved);
  CHECK_FALSE(saved.has("measured"));
}

namespace {
struct Unrestorable {
  static void step() {}
  void save(auto&) const {}
  void load(auto&) { throw std::runtime_error("not restored"); }
};
}  // namespace

TEST_CASE("calibrate: what cannot be put back is an error, and nothing is chosen") {
  Plain plain;
  Unrestorable optimizer;
  auto amp = automatic();
  const auto before = amp.reason();
  const auto step = [&] {
    auto guard = amp.autocast();
    static_cast<void>(plain.model(plain.input));
  };
  const CaughtWarnings warnings;  // of the guard's second attempt
  CHECK_THROWS_WITH(frugal::calibrate(amp, plain.model, optimizer, step, {.rounds = 3, .turn = 0}), "not restored");
  CHECK(amp.reason() == before);
}

namespace {
struct MoveOnlyAccumulator : frugal::GradAccumulator {
  using GradAccumulator::GradAccumulator;
  MoveOnlyAccumulator(MoveOnlyAccumulator&&) = default;
};
}  // namespace

TEST_CASE("Trainer: calibrate that throws in mid-window leaves no window behind, copied policy or not") {
  const auto check = [](auto accumulator) {
    torch::nn::Linear model(4, 4);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    int calls = 0;
    const auto loss = [&](torch::nn::Linear& net, const torch::Tensor& batch) {
      if (++calls == 2) throw std::runtime_error("a bad batch");
      return net->forward(batch).square().mean();
    };
    frugal::Trainer trainer{model, optimizer, loss, automatic(), std::move(accumulator)};
    CHECK_THROWS_WITH(trainer.calibrate(torch::ones({2, 4})), "a bad batch");
    CHECK(trainer.step(torch::ones({2, 4})) == frugal::StepResult::accumulated);
    CHECK(trainer.step(torch::ones({2, 4})) == frugal::StepResult::applied);
  };
  check(frugal::GradAccumulator(2));
  check(MoveOnlyAccumulator(2));
}

namespace {
struct Uncopyable {  // although its type says otherwise
  static constexpr frugal::Role role = frugal::Role::clipping;
  std::vector<std::unique_ptr<int>> parts = {};
  int calls = 0;
  void clip(auto&) { ++calls; }
};
}  // namespace

TEST_CASE("Trainer: calibrate has a policy of the user's make the steps itself") {
  torch::nn::Linear model(4, 2);
  torch::optim::SGD optimizer(model->parameters(), 1e-2);
  const auto loss = [](torch::nn::Linear& net, const torch::Tensor& batch) { return net(batch).square().mean(); };
  frugal::Trainer trainer{model, optimizer, loss, automatic(), Uncopyable{}};
  static_cast<void>(trainer.calibrate(torch::ones({2, 4}), frugal::CalibrationOptions{.rounds = 3, .turn = 0}));
  CHECK(trainer.get<Uncopyable>().calls > 0);
}

TEST_CASE("Trainer: calibrate measures in training mode, and every window is a whole one") {
  torch::nn::Linear model(4, 2);
  torch::optim::SGD optimizer(model->parameters(), 1e-2);
  int training = 0, evaluating = 0;
  const auto loss = [&](torch::nn::Linear& net, const frugal::Batch& batch) {
    ++(net->is_training() ? training : evaluating);
    return net(batch.inputs).square().mean();
  };
  frugal::Trainer trainer{model, optimizer, loss, automatic(), frugal::GradAccumulator(3)};
  trainer.step(frugal::Batch{torch::zeros({0, 4}), torch::zeros({0})});  // counts towards the window, but not of these
  training = 0;
  model->eval();
  static_cast<void>(trainer.calibrate(frugal::Batch{torch::randn({8, 4}), torch::zeros({8})},
                                      frugal::CalibrationOptions{.rounds = 3, .turn = 0}));
  CHECK(training > 0);
  CHECK(training % 3 == 0);
  CHECK(evaluating == 0);
  CHECK_FALSE(model->is_training());
}

// --- turns -------------------------------------------------------------------------------------------------------

TEST_CASE("Duels: a slow minute of the machine meets every way, and does not decide") {
  frugal::testing::FakeClock clock;
  frugal::detail::Duels duels(clock, 0.0, [] {});
  std::size_t now = 0;
  int calls = 0;
  const auto step = [&] {
    const int load = ++calls > 6 && calls < 13 ? 7 : 1;  // rounds in which everything is slow
    clock.advance(std::chrono::milliseconds(load * (now == 1 ? 90 : 100)));
  };
  duels.run(2, 9, 1e9, [&](std::size_t way) { now = way; }, step);
  CHECK(duels.ratio(1, 0).median == Approx(100.0 / 90));
  CHECK(duels.winner(0.02) == 1);
  CHECK(duels.winner(0.2) == 0);
}

TEST_CASE("Duels: what is clearly slower is left out after three rounds, the first way never") {
  frugal::testing::FakeClock clock;
  frugal::detail::Duels duels(clock, 0.0, [] {});
  std::vector<int> taken(3);
  std::size_t now = 0;
  const int cost[] = {300, 100, 200};
  duels.run(
      3, 8, 1e9, [&](std::size_t way) { now = way; },
      [&] { ++taken[now], clock.advance(std::chrono::milliseconds(cost[now])); });
  CHECK(taken == std::vector<int>{9, 9, 4});  // one more each to begin with
  CHECK(duels.rounds(2) == 3);
  CHECK(duels.winner(0.02) == 1);
}

TEST_CASE("Duels: short steps are repeated until a turn lasts, and time runs out after the third round") {
  frugal::testing::FakeClock clock;
  frugal::detail::Duels duels(clock, 0.01, [] {});
  int steps = 0;
  duels.run(1, 9, 0.0, [](std::size_t) {}, [&] { ++steps, clock.advance(std::chrono::milliseconds(1)); });
  CHECK(duels.rounds(0) == 3);
  CHECK(steps == 1 + 3 * (1 + 1 + 2 + 4 + 8 + 16));
}
