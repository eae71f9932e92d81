// Micro-benchmarks of what runs between two steps, each beside the bare work that it is about.

#include <frugal/detail/xxhash64.hpp>
#include <frugal/frugal.hpp>

#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace {

// ---- a loop without a model: what is left is the loop's own work -------------------------------------------------------

struct Number { double weight = 1, gradient = 0; };
struct Loss {
  double value;
  Number* model;
  void backward() const { benchmark::DoNotOptimize(model->gradient += value); }
  Loss mul(double factor) const { return {value * factor, model}; }
  explicit operator double() const { return value; }
};
struct Descent {
  Number& model;
  void step() { benchmark::DoNotOptimize(model.weight -= 0.01 * model.gradient); }
  void zero_grad() { benchmark::DoNotOptimize(model.gradient = 0); }
  void multiply_gradients(double factor) { model.gradient *= factor; }
};
struct Sample {
  double mean = 1;
  std::int64_t size() const { return 2; }
};
struct MeanLoss {
  Loss operator()(Number& model, const Sample& batch) const { return {model.weight * batch.mean, &model}; }
};

void loop_by_hand(benchmark::State& state) {
  Number model;
  Descent optimizer{model};
  const Sample batch;
  for (auto _ : state) {
    MeanLoss{}(model, batch).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}
BENCHMARK(loop_by_hand);

template <class... Policies>
void steps(benchmark::State& state, Policies... policies) {
  Number model;
  Descent optimizer{model};
  frugal::Trainer trainer{model, optimizer, MeanLoss{}, std::move(policies)...};
  const Sample batch;
  for (auto _ : state) trainer.step(batch);
}
void trainer_without_policies(benchmark::State& state) { steps(state); }
BENCHMARK(trainer_without_policies);
void trainer_with_accumulator(benchmark::State& state) { steps(state, frugal::GradAccumulator(4)); }
BENCHMARK(trainer_with_accumulator);
void trainer_with_stopper_and_observer(benchmark::State& state) {
  steps(state, frugal::EarlyStopper(), frugal::OnStep{[](const frugal::Progress&) {}, 1000000});
}
BENCHMARK(trainer_with_stopper_and_observer);

// ---- policies alone ----------------------------------------------------------------------------------------------------

void early_stopper_observe(benchmark::State& state) {
  frugal::EarlyStopper stopper({.patience = std::int64_t{1} << 40});
  double metric = 1;
  for (auto _ : state) benchmark::DoNotOptimize(stopper.observe(metric *= 0.999999));
}
BENCHMARK(early_stopper_observe);

void loss_scaler_applied(benchmark::State& state) {
  frugal::LossScaler scaler;
  for (auto _ : state) scaler.applied();
  benchmark::DoNotOptimize(scaler.scale());
}
BENCHMARK(loss_scaler_applied);

void schedule_rate(benchmark::State& state) {
  const auto rate = frugal::warmup(100, frugal::cosine(100000));
  std::int64_t step = 0;
  for (auto _ : state) benchmark::DoNotOptimize(rate(step = (step + 1) % 100000));
}
BENCHMARK(schedule_rate);

void autocast_region(benchmark::State& state) {
  frugal::AmpPolicy<frugal::Bf16> amp(torch::kCPU, frugal::Capability{.device = torch::kCPU, .cpu_bf16 = true});
  for (auto _ : state) {
    const auto guard = amp.autocast();
    benchmark::ClobberMemory();
  }
}
BENCHMARK(autocast_region);

// ---- data --------------------------------------------------------------------------------------------------------------

void order_of_an_epoch(benchmark::State& state) {
  const auto inputs = torch::zeros({state.range(0), 1}), targets = torch::zeros({state.range(0)});
  const frugal::Batches batches(inputs, targets, {.batch_size = state.range(0)});
  std::int64_t epoch = 0;
  for (auto _ : state)
    for (const auto& batch : batches.epoch(epoch++)) benchmark::DoNotOptimize(batch.size());
}
BENCHMARK(order_of_an_epoch)->Arg(60000)->Unit(benchmark::kMicrosecond);

void random_permutation(benchmark::State& state) {  // what LibTorch's random sampler begins an epoch with
  for (auto _ : state) benchmark::DoNotOptimize(torch::randperm(state.range(0)));
}
BENCHMARK(random_permutation)->Arg(60000)->Unit(benchmark::kMicrosecond);

// ---- checkpoints -------------------------------------------------------------------------------------------------------

void hash_of_a_tensor(benchmark::State& state) {
  const std::vector<std::byte> bytes(static_cast<std::size_t>(state.range(0)), std::byte{7});
  for (auto _ : state) benchmark::DoNotOptimize(frugal::detail::xxhash64(std::span(bytes)));
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(hash_of_a_tensor)->Arg(1 << 20);

void copy_of_a_tensor(benchmark::State& state) {
  const std::vector<std::byte> bytes(static_cast<std::size_t>(state.range(0)), std::byte{7});
  std::vector<std::byte> copy(bytes.size());
  for (auto _ : state) {
    std::memcpy(copy.data(), bytes.data(), bytes.size());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(copy_of_a_tensor)->Arg(1 << 20);

}  // namespace
