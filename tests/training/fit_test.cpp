// Trainer::fit is the loop that one would write by hand, bit for bit, whatever the model, the optimizer and the data.
#include "support/catch.hpp"
#include "training/network.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/averager.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/grad_clip.hpp>
#include <frugal/schedule.hpp>
#include <frugal/trainer.hpp>

#include <cstdint>
#include <utility>
#include <vector>

using namespace frugal;
using namespace network;

namespace {

const std::vector<std::int64_t> sizes{8, 8, 8, 5};

// LibTorch's data set of the same samples, for its DataLoader.
class Samples : public torch::data::Dataset<Samples> {
 public:
  explicit Samples(Data all) : all_(std::move(all)) {}
  torch::data::Example<> get(std::size_t index) override {
    return {all_.inputs[static_cast<std::int64_t>(index)], all_.targets[static_cast<std::int64_t>(index)]};
  }
  torch::optional<std::size_t> size() const override { return static_cast<std::size_t>(all_.inputs.size(0)); }

 private:
  Data all_;
};
struct ExampleLoss {
  torch::Tensor operator()(Net& model, const torch::data::Example<>& batch) const {
    return torch::mse_loss(model(batch.data), batch.target);
  }
  torch::Tensor operator()(Net& model, const std::vector<torch::data::Example<>>& samples) const {
    std::vector<torch::Tensor> inputs, targets;
    for (const auto& sample : samples) inputs.push_back(sample.data), targets.push_back(sample.target);
    return torch::mse_loss(model(torch::stack(inputs)), torch::stack(targets));
  }
};
auto loader(auto dataset) {
  return torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(std::move(dataset), 8);
}

}  // namespace

TEMPLATE_TEST_CASE("fit trains like the loop by hand, bit for bit", "", torch::optim::SGD, torch::optim::AdamW) {
  constexpr auto optimizer_for = [](const std::vector<torch::Tensor>& parameters) {
    if constexpr (std::is_same_v<TestType, torch::optim::SGD>) return sgd(parameters);
    else return adamw(parameters);
  };
  constexpr std::int64_t epochs = 3;
  const Data all = data(29);
  Net expected = make();
  TestType reference = optimizer_for(expected->parameters());
  train_by_hand(expected, reference, cut(all, sizes), epochs);

  Net model = make();
  TestType optimizer = optimizer_for(model->parameters());
  RunReport report;
  SECTION("from a container") {
    Trainer trainer{model, optimizer, MeanLoss{}};
    report = trainer.fit(cut(all, sizes), {.epochs = epochs});
  }
  SECTION("from Batches") {
    const Batches batches(all.inputs, all.targets, {.batch_size = 8, .order = Order::sequential});
    Trainer trainer{model, optimizer, MeanLoss{}};
    report = trainer.fit(batches, {.epochs = epochs});
  }
  SECTION("from LibTorch's DataLoader of collated samples") {
    auto examples = loader(Samples(all).map(torch::data::transforms::Stack<>()));
    Trainer trainer{model, optimizer, ExampleLoss{}};
    report = trainer.fit(*examples, {.epochs = epochs});
  }
  SECTION("from LibTorch's DataLoader of single samples") {
    auto examples = loader(Samples(all));
    Trainer trainer{model, optimizer, ExampleLoss{}};
    report = trainer.fit(*examples, {.epochs = epochs});
  }
  SECTION("in two calls") {
    Trainer trainer{model, optimizer, MeanLoss{}};
    trainer.fit(cut(all, sizes), {.epochs = 1});
    report = trainer.fit(cut(all, sizes), {.epochs = epochs});
  }
  SECTION("with every policy there and switched off") {
    Trainer trainer{model,
                    optimizer,
                    MeanLoss{},
                    GradClip(std::numeric_limits<double>::infinity()),
                    AmpPolicy<>(at::kCPU, AmpOptions{.precision = Precision::fp32}),
                    Averager({.decay = 0}),
                    GradAccumulator(1),
                    Schedule(constant()),
                    EarlyStopper({.patience = 100, .restore_best = false})};
    report = trainer.fit(cut(all, sizes), [&] { return 1.0; }, {.epochs = epochs});
  }
  CHECK(same_bits(state_of(*model), state_of(*expected)));
  CHECK(report.reason == StopReason::finished);
  CHECK(report.progress.epoch == epochs);
  CHECK(report.progress.step == epochs * 4);
  CHECK(report.progress.samples == epochs * 29);
  CHECK(model->is_training());
}

TEST_CASE("shuffled Batches give fit and a loop by hand the same order") {
  const Data all = data(29);
  const Batches batches(all.inputs, all.targets, {.batch_size = 8, .seed = 5});
  Net expected = make();
  auto reference = sgd(expected->parameters());
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) train_by_hand(expected, reference, batches.epoch(epoch), 1);

  Net model = make();
  auto optimizer = sgd(model->parameters());
  Trainer trainer{model, optimizer, MeanLoss{}};
  trainer.fit(batches, {.epochs = 3});
  CHECK(same_bits(state_of(*model), state_of(*expected)));
}

TEST_CASE("max_steps ends the run after that very step, validated") {
  const Data all = data(29);
  Net expected = make();
  auto reference = sgd(expected->parameters());
  train_by_hand(expected, reference, cut(all, sizes), 1);
  train_by_hand(expected, reference, cut(all, {8, 8}), 1);

  Net model = make();
  auto optimizer = sgd(model->parameters());
  std::vector<State> validated;
  Trainer trainer{model, optimizer, MeanLoss{}};
  const RunReport report = trainer.fit(cut(all, sizes), [&] { return validated.push_back(state_of(*model)), 1.0; },
                                       {.epochs = 0, .max_steps = 6});
  CHECK(report.reason == StopReason::finished);
  CHECK(report.progress.step == 6);
  CHECK(report.progress.metric_step == 6);
  CHECK(validated.size() == 2);  // after the epoch and at the end
  CHECK(same_bits(validated.back(), state_of(*expected)));
  CHECK(same_bits(state_of(*model), state_of(*expected)));
}

TEST_CASE("validation every n steps sees the weights of those steps, without gradients, in eval mode") {
  const Data all = data(29);
  std::vector<State> after_step;
  Net expected = make();
  auto reference = adamw(expected->parameters());
  for (std::int64_t epoch = 0; epoch < 2; ++epoch)
    for (const Batch& batch : cut(all, sizes)) {
      train_by_hand(expected, reference, std::vector{batch}, 1);
      after_step.push_back(state_of(*expected));
    }

  Net model = make();
  auto optimizer = adamw(model->parameters());
  std::vector<std::size_t> steps;
  Trainer trainer{model, optimizer, MeanLoss{}};
  const RunReport report =
      trainer.fit(cut(all, sizes),
                  [&] {
                    CHECK_FALSE(model->is_training());
                    CHECK_FALSE(MeanLoss()(model, Batch{all.inputs, all.targets}).requires_grad());
                    std::size_t step = 0;
                    while (step < after_step.size() && !same_bits(state_of(*model), after_step[step])) ++step;
                    steps.push_back(step + 1);
                    return torch::tensor(0.5);
                  },
                  {.epochs = 2, .validate_every_steps = 3});
  CHECK(steps == std::vector<std::size_t>{3, 6, 8});  // the last one: what is left at the end of the run
  CHECK(report.best_metric == 0.5);
  CHECK(same_bits(state_of(*model), after_step.back()));
}

TEST_CASE("ReduceOnPlateau lowers the rate of the very next step") {
  const Data all = data(29);
  const std::vector<Batch> batches = cut(all, sizes);
  Net expected = make();
  auto reference = sgd(expected->parameters());
  const std::vector<double> rates{0.1, 0.1, 0.1 * 0.5, 0.1 * 0.25};  // the metric never improves on the first check
  for (std::size_t i = 0; i < 4; ++i) {
    reference.param_groups()[0].options().set_lr(rates[i]);
    train_by_hand(expected, reference, std::vector{batches[i]}, 1);
  }

  Net model = make();
  auto optimizer = sgd(model->parameters());
  Trainer trainer{model, optimizer, MeanLoss{}, ReduceOnPlateau({.factor = 0.5, .patience = 0})};
  trainer.fit(batches, [] { return 1.0; }, {.epochs = 1, .validate_every_steps = 1});
  CHECK(same_bits(state_of(*model), state_of(*expected)));
}

TEST_CASE("a schedule sets the rate of every step, the first included") {
  const Data all = data(29);
  const std::vector<Batch> batches = cut(all, sizes);
  const auto rate = warmup(2, cosine(6));
  Net expected = make();
  auto reference = sgd(expected->parameters());
  for (std::int64_t step = 0; step < 8; ++step) {
    reference.param_groups()[0].options().set_lr(0.1 * rate(step));
    train_by_hand(expected, reference, std::vector{batches[static_cast<std::size_t>(step % 4)]}, 1);
  }
  Net model = make();
  auto optimizer = sgd(model->parameters());
  Trainer trainer{model, optimizer, MeanLoss{}, Schedule(rate)};
  trainer.fit(batches, {.epochs = 2});
  CHECK(same_bits(state_of(*model), state_of(*expected)));
}

TEST_CASE("clipping and accumulation train like clip_grad_norm_ over the full batch") {
  const Data all = data(32, torch::kDouble);
  Net expected = make(torch::kDouble);
  auto reference = sgd(expected->parameters());
  for (const Batch& batch : cut(all, {16, 16})) {
    MeanLoss()(expected, batch).backward();
    torch::nn::utils::clip_grad_norm_(expected->parameters(), 0.05);
    reference.step();
    reference.zero_grad();
  }
  Net model = make(torch::kDouble);
  auto optimizer = sgd(model->parameters());
  Trainer trainer{model, optimizer, MeanLoss{}, GradClip(0.05), GradAccumulator(3)};
  trainer.fit(cut(all, {6, 6, 4, 6, 6, 4}));
  CHECK(distance(state_of(*model), state_of(*expected)) < 1e-12);
}

namespace {

struct Regression {
  torch::nn::Linear model{6, 3};
  Data all = data(64, torch::kDouble);
  torch::optim::LBFGS optimizer;
  double before;

  Regression()
      : optimizer((model->to(torch::kDouble), model->parameters()), torch::optim::LBFGSOptions(1).max_iter(10)) {
    all.targets = all.inputs.mm(torch::randn({6, 3}, torch::kDouble)).add(0.3);
    before = loss();
  }
  double loss() {
    const torch::NoGradGuard off;
    return MeanLoss()(model, Batch{all.inputs, all.targets}).item<double>();
  }
  std::vector<Batch> batches() const { return {Batch{all.inputs, all.targets}}; }
};

}  // namespace

TEST_CASE("LBFGS fits a regression, in full precision and in bf16") {
  torch::manual_seed(1);
  Regression regression;
  SECTION("full precision") {
    Trainer trainer{regression.model, regression.optimizer, MeanLoss{}};
    const RunReport report = trainer.fit(regression.batches(), {.epochs = 8});
    CHECK(report.progress.step == 8);
    CHECK(report.progress.samples == 8 * 64);
    CHECK(regression.loss() < 1e-8 * regression.before);
  }
  SECTION("bf16") {
    regression.model->to(torch::kFloat);
    regression.all = {regression.all.inputs.to(torch::kFloat), regression.all.targets.to(torch::kFloat)};
    Trainer trainer{regression.model, regression.optimizer, MeanLoss{},
                    AmpPolicy<Bf16>(at::kCPU, Capability{.device = at::kCPU, .cpu_bf16 = true})};
    CHECK(trainer.get<AmpPolicy<Bf16>>().precision() == Precision::bf16);
    trainer.fit(regression.batches(), {.epochs = 8});
    CHECK(regression.loss() < 1e-2 * regression.before);
  }
}

namespace {

// Two modules, which the user keeps together in a struct of his own.
struct Autoencoder {
  torch::nn::Linear encoder{6, 2}, decoder{2, 6};
  std::vector<torch::Tensor> parameters() const {
    std::vector<torch::Tensor> all = encoder->parameters();
    for (const torch::Tensor& one : decoder->parameters()) all.push_back(one);
    return all;
  }
};
struct Reconstruction {
  torch::Tensor operator()(Autoencoder& model, const Batch& batch) const {
    return torch::mse_loss(model.decoder(model.encoder(batch.inputs).tanh()), batch.inputs);
  }
};
Autoencoder autoencoder() {
  torch::manual_seed(2);
  return {};
}

}  // namespace

TEST_CASE("a plain struct of two modules trains, and gets its best weights back") {
  const Data all = data(29);
  Autoencoder expected = autoencoder();
  auto reference = adamw(expected.parameters());
  std::vector<torch::Tensor> best;
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    for (const Batch& batch : cut(all, sizes)) {
      Reconstruction()(expected, batch).backward();
      reference.step();
      reference.zero_grad();
    }
    if (epoch == 1)
      for (const torch::Tensor& one : expected.parameters()) best.push_back(one.detach().clone());
  }

  Autoencoder model = autoencoder();
  auto optimizer = adamw(model.parameters());
  std::vector<double> metrics{3, 1, 2};
  Trainer trainer{model, optimizer, Reconstruction{}, EarlyStopper({.patience = 5})};
  std::size_t check = 0;
  const RunReport report = trainer.fit(cut(all, sizes), [&] { return metrics.at(check++); }, {.epochs = 3});
  CHECK(report.best_metric == 1);
  const std::vector<torch::Tensor> found = model.parameters();
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(torch::equal(found[i], best[i]));
}

namespace {

// One layer is frozen, one is never used: their gradients are undefined at every step.
struct PartlyTrainedImpl : torch::nn::Module {
  torch::nn::Linear frozen = register_module("frozen", torch::nn::Linear(6, 8));
  torch::nn::Linear trained = register_module("trained", torch::nn::Linear(8, 3));
  torch::nn::Linear unused = register_module("unused", torch::nn::Linear(4, 4));
  PartlyTrainedImpl() {
    for (torch::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
  }
  torch::Tensor forward(const torch::Tensor& inputs) { return trained(frozen(inputs).tanh()); }
};
TORCH_MODULE(PartlyTrained);

}  // namespace

TEST_CASE("frozen and unused parameters stay as they are, whatever policies there are") {
  PartlyTrained model = make<PartlyTrained>();
  auto optimizer = adamw(model->parameters());
  const State frozen = state_of(*model->frozen), unused = state_of(*model->unused), trained = state_of(*model->trained);
  const auto fit = [&](auto... policies) {
    Trainer trainer{model, optimizer, MeanLoss{}, std::move(policies)...};
    return trainer.fit(cut(data(29), {8, 8, 8, 5}), [] { return 1.0; }, {.epochs = 2});
  };
  const Capability able{.device = at::kCPU, .cpu_bf16 = true, .cpu_fp16 = true};
  RunReport report;
  SECTION("none") { report = fit(); }
  SECTION("uneven windows, clipped and averaged") {
    report = fit(GradAccumulator(3), GradClip(0.1), Averager({.decay = 0.9}), EarlyStopper(), Schedule(cosine(100)));
  }
  SECTION("clipped by value, in bf16") { report = fit(GradClip::by_value(0.01), AmpPolicy<Bf16>(at::kCPU, able)); }
  SECTION("fp16 with uneven windows") {
    report = fit(AmpPolicy<Fp16>(at::kCPU, able, {.scaler = {.init_scale = 256}}), GradAccumulator(3));
  }
  CHECK(report.progress.step > 0);
  CHECK(report.progress.skipped == 0);
  CHECK(same_bits(state_of(*model->frozen), frozen));
  CHECK(same_bits(state_of(*model->unused), unused));
  CHECK(distance(state_of(*model->trained), trained) > 1e-3);
}
