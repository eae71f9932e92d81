#include "support/catch.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/batch_size_prober.hpp>
#include <frugal/testing.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

using frugal::BatchPlan;
using frugal::BatchSizeProber;
using frugal::MemoryUse;
using frugal::testing::MemoryOracle;

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

BatchPlan plan(std::int64_t effective, std::int64_t limit, frugal::BatchSizeProberOptions options = {}) {
  return BatchSizeProber(options).plan(effective, MemoryOracle(limit));
}

}  // namespace

TEST_CASE("BatchSizeProber keeps the effective batch and splits it evenly") {
  const BatchPlan four = plan(256, 85);
  REQUIRE(four.steps == 4);
  REQUIRE(four.micro_batch == 64);
  REQUIRE(four.effective == 256);
  const BatchPlan seven = plan(256, 40);
  REQUIRE(seven.steps == 7);
  REQUIRE(seven.micro_batch == 37);  // four of 37 and three of 36
  const BatchPlan whole = plan(256, 256);
  REQUIRE(whole.steps == 1);
  REQUIRE(whole.micro_batch == 256);
  REQUIRE(plan(1000, 5000, {.max = 100}).micro_batch == 100);
}

TEST_CASE("BatchSizeProber finds the same plan as trying every size would, whatever fits") {
  std::size_t most_trials = 0;
  for (std::int64_t limit = 1; limit <= 300; ++limit)
    for (const std::int64_t effective : {1, 2, 3, 5, 31, 32, 33, 64, 100, 256, 257, 300, 1000, 65536})
      for (const double margin : {0.0, 0.05, 0.3})
        for (const std::int64_t min : {1, 2, 50}) {
          const std::int64_t max = effective == 1000 ? 120 : 65536;
          const std::int64_t cap = std::min(max, effective), floor = std::min(min, cap);
          const MemoryOracle oracle(limit);
          BatchSizeProber prober({.min = min, .max = max, .margin = margin, .max_trials = 40});
          INFO("limit " << limit << ", effective " << effective << ", margin " << margin << ", min " << min);
          if (limit < floor) {
            REQUIRE_THROWS_WITH(prober.plan(effective, oracle), ContainsSubstring("not even a batch of"));
            continue;
          }
          const BatchPlan plan = prober.plan(effective, oracle);

          std::int64_t allowed =
              std::max(static_cast<std::int64_t>(std::floor(static_cast<double>(limit) * (1 - margin) + 1e-9)),
                       std::min<std::int64_t>(limit, 2));
          if (cap <= limit) allowed = cap;
          const std::int64_t steps = std::min(ceil_div(effective, allowed), ceil_div(effective, floor));
          REQUIRE(plan.effective == effective);
          REQUIRE(plan.steps == steps);
          REQUIRE(plan.micro_batch == ceil_div(effective, steps));
          REQUIRE(plan.micro_batch <= oracle.largest());

          const auto& tried = oracle.tried();
          REQUIRE(*std::ranges::max_element(tried) <= cap);
          REQUIRE(*std::ranges::min_element(tried) >= floor);
          REQUIRE(std::set(tried.begin(), tried.end()).size() == tried.size());
          REQUIRE(static_cast<double>(tried.front()) <=
                  std::max(32.0, std::ceil(static_cast<double>(floor) / (1 - margin))));
          REQUIRE(tried.front() >= std::min<std::int64_t>(16, cap));
          if (limit >= 2 && cap >= 2) REQUIRE(std::ranges::find(tried, 1) == tried.end());  // BatchNorm throws on one
          most_trials = std::max(most_trials, tried.size());
        }
  REQUIRE(most_trials <= 12);
}

TEST_CASE("BatchSizeProber: largest() is exact, was tried, and knows no margin") {
  for (std::int64_t limit = 1; limit <= 300; ++limit)
    for (const std::int64_t max : {200, 65536}) {
      const MemoryOracle oracle(limit);
      BatchSizeProber prober({.max = max, .margin = 0.5});
      INFO("limit " << limit << ", max " << max);
      REQUIRE(prober.largest(oracle) == std::min(limit, max));
      REQUIRE(oracle.succeeded(std::min(limit, max)));
      REQUIRE(std::ranges::max(oracle.tried()) <= max);
    }
}

TEST_CASE("BatchSizeProber keeps to max_trials and takes the best so far") {
  for (int trials = 1; trials <= 8; ++trials) {
    const MemoryOracle oracle(1000);
    const std::int64_t largest = BatchSizeProber({.max_trials = trials}).largest(oracle);
    REQUIRE(std::ssize(oracle.tried()) == trials);
    REQUIRE(largest == oracle.largest());
    const MemoryOracle again(1000);
    const BatchPlan plan = BatchSizeProber({.max_trials = trials}).plan(5000, again);
    REQUIRE(plan.micro_batch <= again.largest());
    REQUIRE(std::ssize(again.tried()) <= trials);
  }
  REQUIRE_THROWS_WITH(BatchSizeProber({.max_trials = 1}).largest(MemoryOracle(4)),
                      ContainsSubstring("Raise max_trials"));
}

namespace {

// So much memory for n samples, of so much: measured, and out of memory above.
struct Measured {
  double fixed, each, square, capacity;
  std::vector<std::int64_t>& tried;

  double peak(std::int64_t n) const {
    const auto size = static_cast<double>(n);
    return fixed + each * size + square * size * size;
  }
  MemoryUse operator()(std::int64_t n) const {
    tried.push_back(n);
    if (peak(n) > capacity) throw std::bad_alloc();
    return {.peak = peak(n), .capacity = capacity};
  }
};

}  // namespace

TEST_CASE("BatchSizeProber fits a line where memory is measured: few trials, and a margin of memory") {
  for (const double square : {0.0, 0.01})
    for (const double capacity : {2000.0, 5000.0, 50000.0, 1e6})
      for (const std::int64_t effective : {64, 256, 1000, 4096, 65536}) {
        std::vector<std::int64_t> tried;
        const Measured trial{.fixed = 1000, .each = 7, .square = square, .capacity = capacity, .tried = tried};
        const BatchPlan plan = BatchSizeProber({.margin = 0.1}).plan(effective, trial);
        INFO("capacity " << capacity << ", effective " << effective << ", square " << square << ", trials "
                         << tried.size());
        REQUIRE(trial.peak(plan.micro_batch) <= 0.9 * capacity);
        REQUIRE(std::ranges::find(tried, plan.micro_batch) != tried.end());
        if (plan.steps > 1 && square == 0) REQUIRE(trial.peak(ceil_div(effective, plan.steps - 1)) > 0.88 * capacity);
        REQUIRE(tried.size() <= (square == 0 ? 5 : 15));
      }
  SECTION("and no margin for largest()") {
    std::vector<std::int64_t> tried;
    const Measured trial{.fixed = 1000, .each = 7, .square = 0, .capacity = 50000, .tried = tried};
    const std::int64_t largest = BatchSizeProber({.margin = 0.5}).largest(trial);
    REQUIRE(largest == 7000);
    REQUIRE(tried.size() <= 4);
  }
  SECTION("when nothing leaves it free, the smallest that fits") {
    std::vector<std::int64_t> tried;
    const Measured trial{.fixed = 950, .each = 7, .square = 0, .capacity = 1000, .tried = tried};
    REQUIRE(BatchSizeProber({.margin = 0.1}).plan(64, trial).micro_batch == 1);
  }
}

TEST_CASE("BatchSizeProber knows what out of memory looks like") {
  const auto is = [](const auto& error) { return BatchSizeProber::is_out_of_memory(error); };
  REQUIRE(is(std::bad_alloc()));
  REQUIRE(is(c10::OutOfMemoryError({__func__, __FILE__, 1}, "anything")));
  for (const char* text :
       {"CUDA out of memory. Tried to allocate 2.00 GiB", "DefaultCPUAllocator: can't allocate memory: you tried to",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "std::bad_alloc",
        "mmap failed: Cannot allocate memory"})
    REQUIRE(is(std::runtime_error(text)));
  for (const char* text : {"CUDA error: an illegal memory access was encountered", "index 7 is out of range",
                           "Expected more than 1 value per channel when training", "CUDNN_STATUS_BAD_PARAM"})
    REQUIRE_FALSE(is(std::runtime_error(text)));
  bool thrown = false;
  try {
    torch::empty({std::int64_t{1} << 50});  // the real thing
  } catch (const std::exception& error) {
    thrown = true;
    REQUIRE(is(error));
  }
  REQUIRE(thrown);
}

TEST_CASE("BatchSizeProber lets other errors through") {
  const auto fail = [](std::int64_t n) {
    if (n > 20) throw std::runtime_error("the data ends here");
  };
  REQUIRE_THROWS_WITH(BatchSizeProber().plan(64, fail), "the data ends here");
  REQUIRE_THROWS_WITH(BatchSizeProber().largest(fail), "the data ends here");

  const auto data = torch::zeros({20, 2});
  const auto too_few = [&](std::int64_t n) { data.narrow(0, 0, n); };
  REQUIRE_THROWS_WITH(BatchSizeProber().plan(64, too_few), ContainsSubstring("set max to the size of the data set"));
  REQUIRE_NOTHROW(BatchSizeProber({.max = 20}).plan(64, too_few));
}

TEST_CASE("BatchSizeProber says what is wrong") {
  const auto contains = [](const char* text) { return ContainsSubstring(text); };
  REQUIRE_THROWS_WITH(plan(0, 10), contains("the effective batch is 0"));
  REQUIRE_THROWS_WITH(plan(256, 3, {.min = 8}), contains("not even a batch of 8 fits"));
  REQUIRE_THROWS_WITH(plan(256, 3, {.min = 8}), contains("MemoryOracle: out of memory with 8 samples"));
  REQUIRE_THROWS_WITH(BatchSizeProber({.min = 0}), contains("1 <= min <= max"));
  REQUIRE_THROWS_WITH(BatchSizeProber({.min = 9, .max = 8}), contains("1 <= min <= max"));
  REQUIRE_THROWS_WITH(BatchSizeProber({.margin = 1}), contains("a share in [0, 1)"));
  REQUIRE_THROWS_WITH(BatchSizeProber({.margin = std::numeric_limits<double>::quiet_NaN()}),
                      contains("a share in [0, 1)"));
  REQUIRE_THROWS_WITH(BatchSizeProber({.max_trials = 0}), contains("Allow at least 1"));
}

namespace {

struct NetImpl : torch::nn::Module {
  torch::nn::Linear in{4, 8}, out{8, 2};
  torch::nn::BatchNorm1d norm{8};
  torch::nn::Dropout dropout{0.5};
  NetImpl() {
    register_module("in", in), register_module("norm", norm);
    register_module("dropout", dropout), register_module("out", out);
  }
  torch::Tensor forward(const torch::Tensor& x) { return out(dropout(torch::relu(norm(in(x))))); }
};
TORCH_MODULE(Net);

torch::Tensor square(Net& net, const torch::Tensor& x) { return net->forward(x).pow(2).mean(); }

// The bits of everything that must come back.
std::vector<torch::Tensor> bits(Net& net, torch::optim::Optimizer& optimizer) {
  std::vector<torch::Tensor> all;
  for (auto& t : net->parameters()) {
    all.push_back(t.detach().clone());
    all.push_back(t.grad().defined() ? t.grad().clone() : torch::full({1}, -1.0));
    const auto state = optimizer.state().find(t.unsafeGetTensorImpl());
    if (state == optimizer.state().end()) continue;
    auto& adam = static_cast<torch::optim::AdamWParamState&>(*state->second);
    all.push_back(adam.exp_avg().clone()), all.push_back(adam.exp_avg_sq().clone());
    all.push_back(torch::tensor(adam.step()));
  }
  for (auto& t : net->buffers()) all.push_back(t.clone());
  for (auto& m : net->modules()) all.push_back(torch::tensor(m->is_training()));
  all.push_back(at::globalContext().defaultGenerator(torch::kCPU).get_state());
  return all;
}
void require_equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) REQUIRE(torch::equal(a[i], b[i]));
}

}  // namespace

TEST_CASE("BatchSizeProber tries the model and leaves no trace") {
  torch::manual_seed(1);
  Net net;
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
  if (GENERATE(false, true)) {
    square(net, torch::randn({8, 4})).backward(), optimizer.step();
  } else {
    square(net, torch::randn({8, 4})).backward();  // gradients, and no state
  }
  net->norm->eval();
  const auto before = bits(net, optimizer);
  const MemoryOracle oracle(40);
  const auto batch = [&](std::int64_t n) { return oracle(n), torch::randn({n, 4}); };

  SECTION("when all goes well") {
    const BatchPlan plan = BatchSizeProber().plan(256, net, optimizer, batch, square);
    REQUIRE(plan.steps == 7);
    REQUIRE(plan.micro_batch == 37);
  }
  SECTION("when memory runs out in the middle of a step") {
    const auto late = [&](Net& model, const torch::Tensor& x) {
      auto loss = square(model, x);
      if (x.size(0) > 40)
        loss.register_hook([](const torch::Tensor& g) {
          if (g.defined()) throw std::bad_alloc();  // in backward
          return g;
        });
      return loss;
    };
    const auto any = [](std::int64_t n) { return torch::randn({n, 4}); };
    REQUIRE(BatchSizeProber().plan(256, net, optimizer, any, late).micro_batch == 37);
  }
  SECTION("when something else fails") {
    const auto broken = [&](Net& model, const torch::Tensor& x) {
      if (!optimizer.state().empty()) throw std::runtime_error("broken");  // after the first update
      return square(model, x);
    };
    REQUIRE_THROWS_WITH(BatchSizeProber().plan(256, net, optimizer, batch, broken), "broken");
  }
  SECTION("with a precision policy, whose counters come back too") {
    frugal::AmpPolicy<frugal::Fp16> amp(torch::kCPU, frugal::Capability{.device = torch::kCPU, .cpu_fp16 = true});
    for (int i = 0; i < 3; ++i) REQUIRE(amp.scale(torch::ones({})).item<float>() > 0);
    frugal::testing::OverflowAt loss{square, {0, 1, 2, 3, 4, 5, 6, 7, 8}};
    BatchSizeProber().plan(256, net, optimizer, batch, loss, amp);
    REQUIRE(amp.scale_factor() == 65536);
    REQUIRE(amp.skipped() == 0);
  }
  require_equal(bits(net, optimizer), before);
}

TEST_CASE("BatchSizeProber tries memory as full as it will be") {
  Net net;
  torch::optim::AdamW optimizer(net->parameters());
  net->eval();
  bool trains = true, state = false, state_and_gradients = false;
  const auto loss = [&](Net& model, const torch::Tensor& x) {
    trains = trains && model->is_training() && model->dropout->is_training();
    state = state || !optimizer.state().empty();
    state_and_gradients = state_and_gradients || (!optimizer.state().empty() && model->in->weight.grad().defined());
    return square(model, x);
  };
  const auto batch = [](std::int64_t n) { return torch::randn({n, 4}); };
  SECTION("in one step") {
    BatchSizeProber().plan(16, net, optimizer, batch, loss);
    REQUIRE_FALSE(state_and_gradients);
  }
  SECTION("in several, where gradients wait") {
    BatchSizeProber({.max = 8}).plan(16, net, optimizer, batch, loss);
    REQUIRE(state_and_gradients);
  }
  REQUIRE(trains);
  REQUIRE(state);
  REQUIRE_FALSE(net->is_training());
  REQUIRE(optimizer.state().empty());
}

TEST_CASE("BatchSizeProber plans for the precision that will run") {
  Net net;
  torch::optim::AdamW optimizer(net->parameters());
  const auto batch = [](std::int64_t n) { return torch::randn({n, 4}); };
  // twice as many fit in half the bytes
  const auto loss = [](Net& model, const torch::Tensor& x) {
    const auto hidden = model->in(x);
    MemoryOracle(hidden.element_size() == 2 ? 80 : 40)(x.size(0));
    return hidden.to(torch::kFloat).pow(2).mean();
  };
  frugal::AmpPolicy<frugal::Bf16> half(torch::kCPU, frugal::Capability{.device = torch::kCPU, .cpu_bf16 = true});
  frugal::AmpPolicy<frugal::Fp32> full(torch::kCPU);
  REQUIRE(BatchSizeProber().plan(256, net, optimizer, batch, loss, half).steps == 4);
  REQUIRE(BatchSizeProber().plan(256, net, optimizer, batch, loss, full).steps == 7);
  REQUIRE(BatchSizeProber().plan(256, net, optimizer, batch, loss).steps == 7);
}

TEST_CASE("BatchSizeProber creates the optimizer's state although the first step overflows") {
  Net net;
  torch::optim::AdamW optimizer(net->parameters());
  bool state = false;
  const auto counted = [&](Net& model, const torch::Tensor& x) {
    state = state || !optimizer.state().empty();
    return square(model, x);
  };
  frugal::testing::OverflowAt loss{counted, {0}};
  frugal::AmpPolicy<frugal::Fp16> amp(torch::kCPU, frugal::Capability{.device = torch::kCPU, .cpu_fp16 = true});
  BatchSizeProber().plan(16, net, optimizer, [](std::int64_t n) { return torch::randn({n, 4}); }, loss, amp);
  REQUIRE(state);
}

TEST_CASE("BatchSizeProber: a trial is not held to the number of skips that training is") {
  Net net;
  torch::optim::AdamW optimizer(net->parameters());
  frugal::testing::OverflowAt loss{square, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}};
  frugal::AmpPolicy<frugal::Fp16> amp(torch::kCPU, frugal::Capability{.device = torch::kCPU, .cpu_fp16 = true},
                                      {.scaler = {.max_consecutive_skips = 1}});
  const MemoryOracle oracle(40);
  const auto batch = [&](std::int64_t n) { return oracle(n), torch::randn({n, 4}); };
  REQUIRE(BatchSizeProber().plan(256, net, optimizer, batch, loss, amp).micro_batch == 37);
  REQUIRE(amp.skipped() == 0);
}

TEST_CASE("BatchSizeProber does not bother BatchNorm with one sample, and takes weighted losses") {
  Net net;
  torch::optim::AdamW optimizer(net->parameters());
  const MemoryOracle oracle(2);
  const auto batch = [&](std::int64_t n) { return oracle(n), torch::randn({n, 4}); };
  const auto loss = [](Net& model, const torch::Tensor& x) {
    return frugal::Weighted{square(model, x), x.size(0) * 3};
  };
  const BatchPlan plan = BatchSizeProber().plan(10, net, optimizer, batch, loss);
  REQUIRE(plan.micro_batch == 2);
  REQUIRE(plan.steps == 5);
}

TEST_CASE("OverflowAt makes the gradients of a call infinite, and not the loss") {
  auto weight = torch::ones({3}).set_requires_grad(true);
  frugal::testing::OverflowAt loss{[&](double factor) { return weight.mul(factor).sum(); }, {1}};
  const auto gradient = [&](double factor) {
    weight.mutable_grad().reset();
    auto value = loss(factor);
    REQUIRE(value.item<double>() == 3 * factor);
    (value * 0.5).backward();
    return weight.grad();
  };
  REQUIRE(gradient(2).equal(torch::ones({3})));
  REQUIRE(gradient(2).isinf().all().item<bool>());
  REQUIRE(gradient(4).equal(torch::full({3}, 2.0)));
  REQUIRE(loss.calls() == 3);
}
