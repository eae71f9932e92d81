#include "support/catch.hpp"

#include <frugal/frugal.hpp>

#include <torch/torch.h>

#include <cstdint>

// The program that users are shown, whole and policy by policy: what is written here is what they write.
namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() { layer = register_module("layer", torch::nn::Linear(8, 2)); }
  torch::Tensor forward(const torch::Tensor& inputs) { return layer->forward(inputs); }
  torch::nn::Linear layer = nullptr;
};
TORCH_MODULE(Net);

// Two classes, told apart by the sign of the first number.
struct Task {
  torch::Tensor images = torch::randn({300, 8});
  torch::Tensor labels = images.select(1, 0).gt(0).to(torch::kLong);

  double error(Net& model) const { return model(images).argmax(1).ne(labels).to(torch::kDouble).mean().item<double>(); }
};

int user_main(const torch::Tensor& images, const torch::Tensor& labels, const torch::Device device) {
  Net model;
  torch::optim::AdamW optimizer(model->parameters(), 1e-1);
  auto loss = [](Net& net, const frugal::Batch& b) { return torch::cross_entropy_loss(net(b.inputs), b.targets); };
  auto validate = [&] { return torch::cross_entropy_loss(model(images), labels); };

  frugal::Batches batches(images, labels, {.batch_size = 256, .micro_batch = 64, .device = device});

  frugal::Trainer trainer{model,
                          optimizer,
                          loss,
                          frugal::AmpPolicy<frugal::Auto>(device),
                          frugal::GradAccumulator(4),
                          frugal::EarlyStopper({.patience = 3}),
                          frugal::ProgressBar{{.stream = nullptr}}};
  return trainer.fit(batches, validate, {.epochs = 20}).exit_code();
}

}  // namespace

TEST_CASE("the sample program runs") {
  torch::manual_seed(1);
  const Task task;
  CHECK(user_main(task.images, task.labels, torch::kCPU) == 0);
}

TEST_CASE("each policy works alone in a loop that the user owns") {
  using namespace frugal;
  torch::manual_seed(1);
  const Task task;
  const torch::Device device = torch::kCPU;
  Net model;
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  const Batches batches(task.images, task.labels, {.batch_size = 64, .micro_batch = 16});
  const auto loss = [](Net& net, const Batch& b) { return torch::cross_entropy_loss(net(b.inputs), b.targets); };

  SECTION("accumulation") {
    GradAccumulator accumulator(4);
    for (std::int64_t epoch = 0; epoch < 20; ++epoch) {
      for (auto& batch : batches.epoch(epoch))
        if (accumulator.backward(loss(model, batch), batch.size())) update(optimizer, accumulator);
      if (accumulator.pending()) update(optimizer, accumulator);
    }
  }
  SECTION("precision, accumulation and clipping") {
    GradAccumulator accumulator(4);
    GradClip clip(1.0);
    AmpPolicy<Fp16> amp(device);  // any subset composes, in any order
    for (std::int64_t epoch = 0; epoch < 20; ++epoch)
      for (auto& batch : batches.epoch(epoch)) {
        auto l = [&] {
          auto guard = amp.autocast();
          return loss(model, batch);
        }();
        if (backward(l, batch.size(), amp, accumulator)) update(optimizer, clip, accumulator, amp);
      }
  }
  SECTION("precision by its own verbs") {
    AmpPolicy<Fp16> amp(device, Capability{.device = torch::kCPU, .cpu_fp16 = true}, {.scaler = {.init_scale = 1024}});
    for (std::int64_t epoch = 0; epoch < 5; ++epoch)
      for (auto& batch : batches.epoch(epoch)) {
        auto l = [&] {
          auto guard = amp.autocast();
          return loss(model, batch);
        }();
        amp.scale(l).backward();
        amp.unscale(optimizer);
        CHECK(amp.step(optimizer));
        optimizer.zero_grad();
      }
    CHECK(amp.precision() == Precision::fp16);
    CHECK(amp.scale_factor() == 1024);
    CHECK(amp.skipped() == 0);
  }
  SECTION("stopping") {
    EarlyStopper stopper({.patience = 5});
    std::int64_t epoch = 0;
    for (; epoch < 1000; ++epoch) {
      for (auto& batch : batches.epoch(epoch)) {
        loss(model, batch).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      if (stopper.observe(task.error(model)) == Verdict::stop) break;
    }
    CHECK(epoch < 1000);
    CHECK(stopper.reason() == StopReason::plateau);
  }
  SECTION("schedule and averaging") {
    Schedule schedule(warmup(10, cosine(90)));
    Averager average({.decay = 0.9});
    std::int64_t step = 0;
    schedule.apply(optimizer, step);
    for (std::int64_t epoch = 0; epoch < 20; ++epoch)
      for (auto& batch : batches.epoch(epoch)) {
        loss(model, batch).backward();
        optimizer.step();
        optimizer.zero_grad();
        schedule.apply(optimizer, ++step);
        average.update(model);
      }
    average.swap(model);
  }

  CHECK(task.error(model) < 0.1);
}

TEST_CASE("a loop that the user owns hands its checks to the Trainer") {
  torch::manual_seed(1);
  const Task task;
  Net model;
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  const auto loss = [](Net& net, const frugal::Batch& b) {
    return frugal::Weighted{torch::cross_entropy_loss(net(b.inputs), b.targets), b.size()};
  };
  const frugal::Batches batches(task.images, task.labels, {.batch_size = 60});
  std::int64_t steps = 0;

  frugal::Trainer trainer{model, optimizer, loss, frugal::EarlyStopper({.target = 0.05}),
                          frugal::OnStep{[&](const frugal::Progress& at) { steps = at.step; }}};
  std::int64_t epoch = 0;
  for (; epoch < 1000; ++epoch) {
    for (auto& batch : batches.epoch(epoch)) CHECK(trainer.step(batch) == frugal::StepResult::applied);
    if (trainer.check({{"error", task.error(model)}, {"epoch", double(epoch)}}) != frugal::StopReason::none) break;
  }
  CHECK(trainer.get<frugal::EarlyStopper>().reason() == frugal::StopReason::target_reached);
  CHECK(steps == batches.size() * (epoch + 1));
  CHECK(trainer.progress().samples == 300 * (epoch + 1));
  CHECK(trainer.restore_best());
}
