#include "support/catch.hpp"

#include "support/caught_warnings.hpp"
#include "support/one_thread.hpp"
#include "support/temporary_directory.hpp"

#include <frugal/frugal.hpp>

#include <torch/torch.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

// The program that users are shown, with everything in it: between the lines of dashes it is what they write.
#pragma GCC diagnostic ignored "-Wshadow"  // they name the model `model` wherever there is one
namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    layers = register_module("layers", torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::BatchNorm1d(16),
                                                             torch::nn::Dropout(0.2), torch::nn::Linear(16, 2)));
  }
  torch::Tensor forward(const torch::Tensor& inputs) {
    if (is_training() && --signal_in == 0) std::raise(SIGTERM);
    return layers->forward(inputs);
  }
  torch::nn::Sequential layers = nullptr;
  static inline std::int64_t signal_in = 0;  // forward passes until somebody wants the machine
};
TORCH_MODULE(Net);

std::vector<torch::Tensor> weights_of_last_run;

int user_main(const torch::Tensor& images, const torch::Tensor& labels, const torch::Device device) {
  torch::manual_seed(1);
  const auto sample = [&](std::int64_t n) { return frugal::Batch{images.narrow(0, 0, n), labels.narrow(0, 0, n)}; };
  struct KeepWeights {
    Net& model;
    ~KeepWeights() {
      weights_of_last_run.clear();
      for (const auto& weights : model->parameters()) weights_of_last_run.push_back(weights.detach().clone());
    }
  };
  // -----------------------------------------------------------------------------------------------------------------
  Net model;
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  auto loss = [](Net& model, const frugal::Batch& b) { return torch::cross_entropy_loss(model(b.inputs), b.targets); };
  // -----------------------------------------------------------------------------------------------------------------
  const KeepWeights keep{model};
  auto validate = [&] { return loss(model, {images, labels}); };
  // -----------------------------------------------------------------------------------------------------------------

  frugal::BatchPlan plan = frugal::BatchSizeProber{}.plan(256, model, optimizer, sample, loss);
  frugal::Batches batches(images, labels, {.batch_size = 256, .micro_batch = plan.micro_batch, .device = device});

  frugal::Trainer trainer{model,
                          optimizer,
                          loss,
                          frugal::AmpPolicy<frugal::Auto>(device),
                          frugal::GradAccumulator(plan.steps),
                          frugal::FusedStep{},
                          frugal::EarlyStopper({.patience = 3}),
                          frugal::CheckpointManager({.directory = "runs/fashion"}),
                          frugal::Preemption{},
                          frugal::ProgressBar{}};
  trainer.resume();
  return trainer.fit(batches, validate, {.epochs = 20}).exit_code();
  // -----------------------------------------------------------------------------------------------------------------
}

// Surroundings of its own for the program: it writes where it is started, and its tensors are too small for threads.
class Place {
 public:
  Place() { std::filesystem::current_path(directory_.path()); }
  ~Place() { std::filesystem::current_path(before_); }

 private:
  std::filesystem::path before_ = std::filesystem::current_path();
  OneThread one_thread_;
  TemporaryDirectory directory_;
};

// How the program ends, and which weights it leaves, when it is interrupted after so many forward passes each time.
std::pair<std::vector<int>, std::vector<torch::Tensor>> run(const std::vector<std::int64_t>& interruptions) {
  const Place place;
  torch::manual_seed(2);
  const torch::Tensor images = torch::randn({600, 8}), labels = images.select(1, 0).gt(0).to(torch::kLong);
  std::vector<int> codes;
  for (const std::int64_t passes : interruptions) {
    NetImpl::signal_in = passes;
    codes.push_back(user_main(images, labels, torch::kCPU));
  }
  return {codes, weights_of_last_run};
}

bool same(const std::vector<torch::Tensor>& one, const std::vector<torch::Tensor>& other) {
  bool same = one.size() == other.size() && !one.empty();
  for (std::size_t i = 0; same && i < one.size(); ++i) same = one[i].equal(other[i]);
  return same;
}

}  // namespace

TEST_CASE("the whole program runs, and ends the same however often it is interrupted") {
  const std::int64_t never = 0;
  const auto [codes, weights] = run({never});
  CHECK(codes == std::vector{0});

  // trials of the prober are forward passes too, before anything handles signals: 20 are more than it makes
  const auto [interrupted_codes, interrupted_weights] = run({20, 33, 25, never});
  CHECK(interrupted_codes == std::vector{75, 75, 75, 0});
  CHECK(same(weights, interrupted_weights));
}

TEST_CASE("the whole program, started again when it is over, says so and leaves the same weights") {
  const auto [codes, weights] = run({0});
  CaughtWarnings warnings;
  const auto [again_codes, again_weights] = run({0, 0});
  CHECK(again_codes == std::vector{0, 0});
  CHECK(warnings.with("this run is over") == 1);
  CHECK(same(weights, again_weights));
}
