// Mixed precision trains to where full precision does, with every other policy beside it.
#include "support/catch.hpp"
#include "training/network.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/averager.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/grad_clip.hpp>
#include <frugal/observers.hpp>
#include <frugal/schedule.hpp>
#include <frugal/trainer.hpp>

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

using namespace frugal;
using namespace network;

namespace {

// at::linear takes its weight as it is, so that the cast of it can be cached: a stale one would be used forever.
struct CachedNetImpl : torch::nn::Module {
  torch::Tensor first = register_parameter("first", torch::randn({8, 6}) * 0.4);
  torch::Tensor second = register_parameter("second", torch::randn({3, 8}) * 0.4);
  torch::Tensor forward(const torch::Tensor& inputs) { return at::linear(at::linear(inputs, first).tanh(), second); }
};
TORCH_MODULE(CachedNet);

const Capability able{.device = at::kCPU, .cpu_bf16 = true, .cpu_fp16 = true};
const std::vector<std::int64_t> sizes{8, 8, 8, 5};
constexpr std::int64_t epochs = 10;

struct Trained {
  CachedNet model = make<CachedNet>();
  torch::optim::SGD optimizer{model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)};
  RunReport report;
  double before = loss();

  template <class... Policies>
  explicit Trained(Policies... policies) {
    Trainer trainer{model, optimizer, MeanLoss{}, std::move(policies)...};
    report = trainer.fit(cut(data(29), sizes), {.epochs = epochs});
  }
  double loss() {
    const torch::NoGradGuard off;
    const Data all = data(29);
    return MeanLoss()(model, Batch{all.inputs, all.targets}).item<double>();
  }
  State state() { return state_of(*model); }
};

struct CountsSkips {
  static constexpr Role role = Role::observer;
  std::int64_t* skips;
  void on_skip(const Progress& at) { *skips = at.skipped; }
};

LossScalerOptions start_at(double scale) { return {.init_scale = scale}; }

}  // namespace

TEST_CASE("bf16 and fp16 train close to full precision") {
  Trained full;
  REQUIRE(full.loss() < 0.5 * full.before);
  SECTION("bf16") {
    Trained half(AmpPolicy<Bf16>(at::kCPU, able));
    CHECK(half.loss() == Approx(full.loss()).epsilon(0.05));
    CHECK(distance(half.state(), full.state()) < 0.05);
    CHECK_FALSE(same_bits(half.state(), full.state()));  // it was bf16
  }
  SECTION("fp16") {
    Trained half(AmpPolicy<Fp16>(at::kCPU, able, {.scaler = start_at(1024)}));
    CHECK(half.loss() == Approx(full.loss()).epsilon(0.01));
    CHECK(distance(half.state(), full.state()) < 0.01);
    CHECK_FALSE(same_bits(half.state(), full.state()));
    CHECK(half.report.progress.skipped == 0);
  }
  SECTION("full precision by policy is full precision") {
    CHECK(same_bits(Trained(AmpPolicy<Fp32>(at::kCPU)).state(), full.state()));
    CHECK(same_bits(Trained(AmpPolicy<BitExact>(at::kCPU)).state(), full.state()));
    CHECK(same_bits(Trained(AmpPolicy<Bf16>(at::kCPU, Capability{.device = at::kCPU})).state(), full.state()));
  }
}

TEST_CASE("scaled, uneven, clipped windows train close to full precision") {
  Trained full(GradAccumulator(3), GradClip(0.5), Schedule(cosine(40)));
  Trained half(Schedule(cosine(40)), GradClip(0.5), AmpPolicy<Fp16>(at::kCPU, able, {.scaler = start_at(4096)}),
               GradAccumulator(3));
  CHECK(full.report.progress.step == 2 * epochs);
  CHECK(half.report.progress.step == 2 * epochs);
  CHECK(distance(half.state(), full.state()) < 0.01);  // a scale or a factor that is lost is off by hundreds
}

TEST_CASE("a scale that overflows is lowered, and only then anything moves") {
  std::int64_t skips = 0;
  Trained half(AmpPolicy<Fp16>(at::kCPU, able, {.scaler = {.init_scale = 16777216, .growth_interval = 1000000}}),
               CountsSkips{&skips}, Averager({.decay = 0.5}));
  CHECK(half.report.progress.skipped > 0);
  CHECK(skips == half.report.progress.skipped);
  CHECK(half.report.progress.step + half.report.progress.skipped == epochs * 4);
  CHECK(half.loss() < 0.6 * half.before);
  for (const torch::Tensor& parameter : half.model->parameters()) CHECK(parameter.isfinite().all().item<bool>());
}

TEST_CASE("a window of micro-batches in fp16 has one scale") {
  std::vector<double> gradients;
  Trained half(AmpPolicy<Fp16>(at::kCPU, able, {.scaler = {.init_scale = 256, .growth_interval = 1}}),
               GradAccumulator(2),
               OnGradients{[&](CachedNet& model) { gradients.push_back(model->first.grad().norm().item<double>()); }});
  std::vector<double> expected;
  Trained full(GradAccumulator(2),
               OnGradients{[&](CachedNet& model) { expected.push_back(model->first.grad().norm().item<double>()); }});
  REQUIRE(gradients.size() >= 5);
  for (std::size_t i = 0; i < 5; ++i) CHECK(gradients[i] == Approx(expected[i]).epsilon(0.02));
}
