#include "support/catch.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/averager.hpp>
#include <frugal/batches.hpp>
#include <frugal/checkpoint_manager.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/fused_step.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/grad_clip.hpp>
#include <frugal/schedule.hpp>
#include <frugal/trainer.hpp>

#include <unistd.h>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

using namespace frugal;

// Killed at any micro-batch and resumed by new objects, any number of times, a run ends bit for bit where an undisturbed
// one does: dropout, batch normalisation, shuffling, bf16, unfinished windows, schedule, patience, averages, best weights.

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    using namespace torch::nn;
    layers = register_module("layers", Sequential(Linear(6, 16), BatchNorm1d(16), ReLU(), Dropout(0.3), Linear(16, 3)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers = nullptr;
};
TORCH_MODULE(Net);

struct Data {
  torch::Tensor inputs = torch::sin(torch::arange(46 * 6).to(torch::kFloat).mul(1.7)).reshape({46, 6});
  torch::Tensor targets = inputs.argmax(1).remainder(3);
};

class Rows : public torch::data::datasets::Dataset<Rows> {
 public:
  torch::data::Example<> get(std::size_t i) override {
    const auto row = static_cast<std::int64_t>(i);
    return {data_.inputs[row], data_.targets[row]};
  }
  std::optional<std::size_t> size() const override { return static_cast<std::size_t>(data_.inputs.size(0)); }

 private:
  Data data_;
};

// A directory that goes with the test.
struct Folder {
  std::filesystem::path path;
  explicit Folder(const std::string& name)
      : path(std::filesystem::temp_directory_path() / ("frugal-resume-" + name + "-" + std::to_string(getpid()))) {
    std::filesystem::remove_all(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

struct Interruption {
  static constexpr Role role = Role::interruption;
  const bool* asked;
  bool requested() const { return *asked; }
};

// Every bit that a run leaves: weights, buffers, the state of the optimizer, metrics, counters, random numbers.
using Traces = std::vector<torch::Tensor>;

Traces traces(Net& model, torch::optim::AdamW& optimizer, const RunReport& report) {
  Traces all;
  for (const auto& parameter : model->parameters()) {
    const auto& state =
        static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
    all.push_back(parameter.detach().clone());
    all.push_back(state.exp_avg().clone());
    all.push_back(state.exp_avg_sq().clone());
    all.push_back(torch::tensor(state.step()));
  }
  for (const auto& buffer : model->buffers()) all.push_back(buffer.clone());
  all.push_back(torch::tensor({report.best_metric, report.progress.metric, report.progress.loss}, torch::kDouble));
  all.push_back(torch::tensor({report.progress.step, report.progress.samples, report.progress.epoch}));
  all.push_back(torch::rand({4}));
  return all;
}
bool same(const Traces& one, const Traces& other) {
  if (one.size() != other.size()) return false;
  for (std::size_t i = 0; i < one.size(); ++i)
    if (!one[i].equal(other[i])) return false;
  return true;
}

// Trains, interrupted every `every` micro-batches (0: never) and continued by new objects, each in "another process": with
// other random numbers and other first weights.
Traces train(const std::string& name, int every, std::int64_t window, auto&& fit) {
  const Folder folder(name + "-" + std::to_string(every) + "-" + std::to_string(window));
  for (int attempt = 0; attempt < 500; ++attempt) {
    torch::manual_seed(attempt == 0 ? 3 : 1000u + static_cast<unsigned>(attempt));
    Net model;
    torch::optim::AdamW optimizer(model->parameters(), 0.02);
    bool asked = false;
    int left = every;
    auto loss = [&](Net& net, const auto& batch) {
      asked = --left == 0;
      if constexpr (requires { batch.inputs; }) return torch::cross_entropy_loss(net(batch.inputs), batch.targets);
      else return torch::cross_entropy_loss(net(batch.data), batch.target);
    };
    Trainer trainer{model,
                    optimizer,
                    loss,
                    AmpPolicy<Bf16>(torch::kCPU, Capability{.device = torch::kCPU, .cpu_bf16 = true}),
                    GradAccumulator({.steps = window, .at_epoch_end = AtEpochEnd::carry}),
                    GradClip(1.0),
                    FusedStep{},
                    Schedule(warmup(3, cosine(40))),
                    Averager({.decay = 0.9}),
                    EarlyStopper({.patience = 3, .smoothing = 0.3}),
                    CheckpointManager({.directory = folder.path, .every_steps = 4}),
                    Interruption{&asked}};
    CHECK(trainer.resume() == (attempt > 0));
    const RunReport report = fit(trainer, model);
    if (report.reason != StopReason::preempted) return traces(model, optimizer, report);
    CHECK(report.exit_code() == 75);
  }
  throw std::runtime_error("the run never ends");
}

// A validation that draws random numbers itself.
auto validation(Net& model) {
  return [&model] {
    const Data data;
    return torch::cross_entropy_loss(model(data.inputs), data.targets).add(torch::rand({}).mul(0.1)).item<double>();
  };
}

}  // namespace

TEST_CASE("over Batches, an interrupted run ends bit for bit where an undisturbed one does") {
  const auto fit = [](auto& trainer, Net& model) {
    const Data data;
    const Batches batches(data.inputs, data.targets, {.batch_size = 12, .micro_batch = 4, .seed = 11});
    return trainer.fit(batches, validation(model), {.epochs = 3});
  };
  for (const std::int64_t window : {1, 5}) {
    const Traces whole = train("batches", 0, window, fit);
    for (const int every : {1, 5, 17}) CHECK(same(train("batches", every, window, fit), whole));
  }
}

TEST_CASE("over LibTorch's DataLoader, by replay, with and without workers") {
  for (const std::size_t workers : {0u, 2u}) {
    const auto fit = [&](auto& trainer, Net& model) {
      auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
          Rows().map(torch::data::transforms::Stack<>()),
          torch::data::DataLoaderOptions().batch_size(4).workers(workers));
      return trainer.fit(*loader, validation(model), {.epochs = 2});
    };
    const Traces whole = train("loader", 0, 3, fit);
    for (const int every : {1, 5, 12}) CHECK(same(train("loader", every, 3, fit), whole));
  }
}

TEST_CASE("with another micro_batch the unfinished window starts again, and no sample is lost or seen twice") {
  const Folder folder("micro-batch");
  const Data data;
  RunReport report;
  torch::manual_seed(1);
  for (int attempt = 0; attempt < 100; ++attempt) {
    Net model;
    torch::optim::AdamW optimizer(model->parameters(), 0.02);
    bool asked = false;
    int left = 7;
    auto loss = [&](Net& net, const Batch& batch) {
      asked = --left == 0;
      return torch::cross_entropy_loss(net(batch.inputs), batch.targets);
    };
    const Batches batches(data.inputs, data.targets, {.batch_size = 12, .micro_batch = attempt % 2 == 0 ? 4 : 3});
    Trainer trainer{model,
                    optimizer,
                    loss,
                    GradAccumulator(batches.steps()),
                    CheckpointManager({.directory = folder.path}),
                    Interruption{&asked}};
    trainer.resume();
    report = trainer.fit(batches, {.epochs = 3});
    if (report.reason != StopReason::preempted) break;
  }
  CHECK(report.progress.samples == 3 * 46);
  CHECK(report.progress.step == 3 * 4);
}

TEST_CASE("a fresh run, or a new one, into a used directory is refused before its first step") {
  const Folder folder("used");
  const Data data;
  Net model;
  torch::optim::AdamW optimizer(model->parameters(), 0.02);
  const Batches batches(data.inputs, data.targets, {.batch_size = 12});
  auto loss = [](Net& net, const Batch& batch) { return torch::cross_entropy_loss(net(batch.inputs), batch.targets); };
  Trainer first{model, optimizer, loss, CheckpointManager({.directory = folder.path})};
  first.fit(batches, {.epochs = 2});
  first.restart();
  CHECK_THROWS_WITH(first.fit(batches), ContainsSubstring("another run"));
  CHECK(first.progress().step == 0);

  Trainer discarding{model, optimizer, loss,
                     CheckpointManager({.directory = folder.path, .existing = Existing::discard})};
  discarding.fit(batches, {.epochs = 3});
  discarding.restart();
  discarding.fit(batches, {.epochs = 1});  // its triggers count from its own start
  const auto kept = discarding.template get<CheckpointManager<>>().list();
  REQUIRE(kept.size() == 1);
  CHECK(kept.back().progress.epoch == 1);
}

TEST_CASE("a longer fit goes on with the weights that were trained, not with the best ones it left in the model") {
  const Data data;
  const Batches batches(data.inputs, data.targets, {.batch_size = 12, .seed = 11});
  auto loss = [](Net& net, const Batch& batch) { return torch::cross_entropy_loss(net(batch.inputs), batch.targets); };
  const auto run = [&](const std::vector<std::int64_t>& fits, const std::filesystem::path& directory) {
    torch::manual_seed(2);
    Net model;
    torch::optim::AdamW optimizer(model->parameters(), 0.02);
    int checks = 0;
    const std::vector<double> metrics{3, 1, 2, 5, 4, 6};  // the best check is never the last
    Trainer trainer{model, optimizer, loss, EarlyStopper({.patience = 9}), CheckpointManager({.directory = directory})};
    std::vector<torch::Tensor> trained;
    for (const std::int64_t epochs : fits) {
      trainer.fit(batches, [&] { return metrics.at(static_cast<std::size_t>(checks++)); }, {.epochs = epochs});
      if (!directory.empty()) trainer.save(), trainer.resume();  // what the model holds is the best: the file has both
    }
    trainer.step(*batches.epoch(0).begin());
    for (const auto& parameter : model->parameters()) trained.push_back(parameter.detach().clone());
    return trained;
  };
  const Folder folder("longer");
  CHECK(same(run({6}, {}), run({3, 6}, {})));
  CHECK(same(run({6}, {}), run({3, 6}, folder.path)));
}
