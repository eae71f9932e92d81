#include "support/catch.hpp"
#include "support/operators.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/averager.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/state_guard.hpp>
#include <frugal/update.hpp>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

// AmpOptions::weight_casts and AmpOptions::attention: kernels of ours at the autocast key, counted by owner.

using frugal::AmpPolicy;
using frugal::Attention;
using frugal::Bf16;
using frugal::WeightCasts;

namespace {

const frugal::Capability able_cpu{.device = at::kCPU, .cpu_bf16 = true};

AmpPolicy<Bf16> stock() { return AmpPolicy<Bf16>(at::kCPU, able_cpu); }
AmpPolicy<Bf16> once_per_step() { return AmpPolicy<Bf16>(at::kCPU, able_cpu, {.weight_casts = WeightCasts::per_step}); }
AmpPolicy<Bf16> attention_in_fp32() { return AmpPolicy<Bf16>(at::kCPU, able_cpu, {.attention = Attention::fp32}); }

struct Warnings : c10::WarningHandler {
  std::vector<std::string> texts;
  c10::WarningUtils::WarningHandlerGuard guard{this};
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
};

at::Tensor forward(AmpPolicy<Bf16>& amp, auto& layer, const at::Tensor& input) {
  auto guard = amp.autocast();
  return layer->forward(input);
}

// Casts that `forwards` forward passes make, the inputs' aside.
int casts(AmpPolicy<Bf16>& amp, auto& layer, const at::Tensor& input, int forwards) {
  const auto cast_before = input.to(at::kBFloat16);
  const Operators counted;
  for (int i = 0; i < forwards; ++i) forward(amp, layer, cast_before);
  return counted["aten::_to_copy"];
}

bool registered(const char* name, const char* overload = "") {
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  return found->dumpState().find("frugal") != std::string::npos;
}

torch::nn::Linear linear() {
  torch::manual_seed(7);
  return torch::nn::Linear(6, 4);
}
at::Tensor input() {
  torch::manual_seed(8);
  return torch::randn({5, 6});
}

}  // namespace

TEST_CASE("autocast kernels: taking the place of LibTorch's is not warned of") {  // first: LibTorch warns once
  Warnings warnings;
  const auto amp = attention_in_fp32();
  const auto other = once_per_step();
  CHECK(registered("aten::scaled_dot_product_attention"));
  CHECK(registered("aten::t"));
  CHECK(warnings.texts.empty());
}

TEST_CASE("autocast kernels: they are gone with their last owner") {
  CHECK_FALSE(registered("aten::t"));
  {
    auto first = once_per_step();
    {
      const auto second = once_per_step();
      const auto moved = std::move(first);
      CHECK(registered("aten::t"));
    }
    CHECK_FALSE(registered("aten::t"));  // the second owner and the moved first one are gone
  }
  CHECK_FALSE(registered("aten::scaled_dot_product_attention"));
  auto layer = linear();
  auto amp = stock();
  CHECK(casts(amp, layer, input(), 3) == 6);  // weight and bias in each: as LibTorch does
}

TEST_CASE("weight casts: once per optimizer step, however many micro-batches there are") {
  const auto counted = [](auto layer, const at::Tensor& example, int weights) {
    torch::optim::SGD optimizer(layer->parameters(), 0.1);
    auto as_ever = stock();
    CHECK(casts(as_ever, layer, example, 4) == 4 * weights);
    auto once = once_per_step();
    CHECK(casts(once, layer, example, 4) == weights);
    CHECK(casts(once, layer, example, 4) == 0);
    forward(once, layer, example).sum().backward();
    once.step(optimizer);
    CHECK(casts(once, layer, example, 4) == weights);
  };
  counted(torch::nn::Linear(6, 4), torch::randn({5, 6}), 2);
  counted(torch::nn::Linear(torch::nn::LinearOptions(6, 4).bias(false)), torch::randn({2, 5, 6}), 1);
  counted(torch::nn::Conv1d(torch::nn::Conv1dOptions(3, 4, 3)), torch::randn({2, 3, 8}), 2);
  counted(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(1)), torch::randn({2, 3, 8, 8}), 2);
  counted(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(torch::kSame)), torch::randn({2, 3, 8, 8}), 2);
  counted(torch::nn::Conv3d(torch::nn::Conv3dOptions(3, 4, 3)), torch::randn({2, 3, 4, 4, 4}), 2);
  counted(torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(3, 4, 3)), torch::randn({2, 3, 8, 8}), 2);
}

TEST_CASE("weight casts: gradients are those of LibTorch's autocast, bit for bit") {
  const auto gradients = [](AmpPolicy<Bf16> amp) {
    torch::manual_seed(9);
    torch::nn::Sequential model(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(1)), torch::nn::ReLU(),
                                torch::nn::Flatten(), torch::nn::Linear(64, 16), torch::nn::Tanh(),
                                torch::nn::Linear(16, 3));
    frugal::GradAccumulator accumulator(4);
    for (int i = 0; i < 4; ++i) {
      const auto loss = forward(amp, model, torch::randn({2, 3, 4, 4})).to(at::kFloat).square().mean();
      std::ignore = frugal::backward(loss, 2, amp, accumulator);
    }
    std::vector<at::Tensor> all;
    for (const auto& weight : model->parameters()) all.push_back(weight.grad());
    return all;
  };
  const auto ours = gradients(once_per_step()), theirs = gradients(stock());
  REQUIRE(ours.size() == 6);
  for (std::size_t i = 0; i < ours.size(); ++i) {
    CHECK(ours[i].equal(theirs[i]));
    CHECK(ours[i].abs().sum().item<double>() > 0);
  }
}

TEST_CASE("weight casts: never stale, whoever changed the weight inside the window") {
  auto layer = linear();
  torch::optim::SGD optimizer(layer->parameters(), 0.5);
  auto amp = once_per_step();
  const auto x = input();
  const auto fresh = [&] {
    auto other = stock();
    return forward(other, layer, x);
  };
  const auto follows = [&](const std::function<void()>& change) {
    const auto before = forward(amp, layer, x);
    change();
    const auto after = forward(amp, layer, x);
    CHECK(after.equal(fresh()));
    return !after.equal(before);
  };
  const torch::nn::Linear other{6, 4};
  const auto no_grad = [](auto&& change) {
    return [change] {
      const torch::NoGradGuard guard;
      change();
    };
  };
  CHECK(follows([&] {
    forward(amp, layer, x).sum().backward();
    CHECK(amp.step(optimizer));
  }));
  CHECK(follows(no_grad([&] { layer->weight.mul_(2); })));
  CHECK(follows(no_grad([&] { layer->weight.copy_(other->weight); })));
  CHECK(follows([&] { layer->weight.set_data(other->weight.detach().clone().mul_(3)); }));
  {
    frugal::StateGuard guard(layer, optimizer);  // writes past LibTorch's version counter
    no_grad([&] { layer->weight.mul_(5); })();
    CHECK(follows([&] { guard.restore(); }));
  }
  frugal::Averager averager({.decay = 0.5});
  averager.update(layer);
  no_grad([&] { layer->weight.mul_(2); })();
  averager.update(layer);
  CHECK(follows([&] { averager.swap(layer); }));
  CHECK(follows([&] { averager.swap(layer); }));
  CHECK(follows([&] { layer->weight = other->weight.detach().clone().mul_(4).requires_grad_(); }));
}

TEST_CASE("weight casts: an evaluation inside the window neither sees old casts nor costs a gradient") {
  auto layer = linear();
  auto amp = once_per_step();
  const auto x = input();
  {
    const torch::NoGradGuard guard;
    const auto first = forward(amp, layer, x);
    layer->weight.mul_(2);
    auto other = stock();
    CHECK(forward(amp, layer, x).equal(forward(other, layer, x)));
    CHECK_FALSE(forward(amp, layer, x).equal(first));
  }
  forward(amp, layer, x).sum().backward();
  REQUIRE(layer->weight.grad().defined());
  const auto once = layer->weight.grad().clone();
  {
    const torch::NoGradGuard guard;
    forward(amp, layer, x);
  }
  forward(amp, layer, x).sum().backward();
  CHECK(layer->weight.grad().equal(once * 2));
}

TEST_CASE("weight casts: nothing changes outside of the owner's regions") {
  auto layer = linear();
  const auto owner = once_per_step();
  auto other = stock();
  CHECK(casts(other, layer, input(), 3) == 6);
  const auto plain = layer->forward(input());
  CHECK(plain.scalar_type() == at::kFloat);
  at::autocast::set_autocast_enabled(at::kCPU, true);  // a user's own
  const auto weight_t = layer->weight.t(), theirs = layer->forward(input());
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  CHECK(weight_t.scalar_type() == at::kFloat);
  CHECK(theirs.scalar_type() == at::kBFloat16);
}

TEST_CASE("weight casts: frozen and shared weights, and those of other dtypes") {
  auto layer = linear();
  layer->weight.requires_grad_(false);
  auto amp = once_per_step();
  forward(amp, layer, input()).sum().backward();
  CHECK_FALSE(layer->weight.grad().defined());
  CHECK(layer->bias.grad().defined());
  layer->to(at::kDouble);
  auto other = stock();
  const auto x = input().to(at::kDouble);
  CHECK(forward(amp, layer, x).scalar_type() == forward(other, layer, x).scalar_type());

  const auto tied = torch::randn({4, 4}).requires_grad_();
  const auto twice = [&](AmpPolicy<Bf16> policy) {
    tied.mutable_grad() = at::Tensor();
    {
      auto guard = policy.autocast();
      torch::mm(torch::mm(torch::ones({2, 4}), tied.t()), tied.t()).sum().backward();
    }
    return tied.grad().clone();
  };
  CHECK(
      torch::allclose(twice(once_per_step()), twice(stock()), 1e-2, 1e-2));  // summed in bf16, as LibTorch's cache does
}

TEST_CASE("weight casts: their memory ends with the step") {
  auto layer = linear();
  torch::optim::SGD optimizer(layer->parameters(), 0.5);
  auto amp = once_per_step();
  const auto owners = layer->weight.use_count();
  forward(amp, layer, input()).sum().backward();
  CHECK(layer->weight.use_count() > owners);
  amp.step(optimizer);
  CHECK(layer->weight.use_count() == owners);
}

TEST_CASE("attention: in fp32 for the owner's regions, in low precision elsewhere") {
  torch::manual_seed(5);
  const auto q = torch::randn({2, 2, 8, 4}).requires_grad_(), k = torch::randn({2, 2, 8, 4}),
             v = torch::randn({2, 2, 8, 4});
  const auto mask = torch::zeros({8, 8}), low_mask = mask.to(at::kBFloat16);
  const auto attend = [&](AmpPolicy<Bf16>& amp, const std::optional<at::Tensor>& bias = {}) {
    auto guard = amp.autocast();
    return torch::scaled_dot_product_attention(q, k.to(at::kBFloat16), v, bias);
  };
  auto owner = attention_in_fp32();
  auto other = stock();
  CHECK(attend(owner).scalar_type() == at::kFloat);
  CHECK(attend(owner, mask).scalar_type() == at::kFloat);
  CHECK(attend(owner, low_mask).scalar_type() == at::kFloat);
  CHECK(attend(owner).equal(torch::scaled_dot_product_attention(q, k.to(at::kBFloat16).to(at::kFloat), v)));
  CHECK(attend(other).scalar_type() == at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto theirs = torch::scaled_dot_product_attention(q, k, v);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  CHECK(theirs.scalar_type() == at::kBFloat16);
  attend(owner).sum().backward();
  CHECK(q.grad().scalar_type() == at::kFloat);
}

TEST_CASE("AmpOptions: attention and casts mean nothing where nothing is cast") {
  const AmpPolicy<> full(at::kCPU, frugal::Capability{.device = at::kCPU},
                         {.attention = Attention::fp32, .weight_casts = WeightCasts::per_step});
  CHECK(full.precision() == frugal::Precision::fp32);
  CHECK_FALSE(registered("aten::t"));
  CHECK_FALSE(registered("aten::scaled_dot_product_attention"));
}
