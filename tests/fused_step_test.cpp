#include "support/catch.hpp"
#include "support/operators.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/fused_step.hpp>
#include <frugal/update.hpp>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

using frugal::FusedStep;
using torch::optim::Adagrad;
using torch::optim::AdagradOptions;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

using Tensors = std::vector<torch::Tensor>;

torch::Tensor leaf(const torch::Tensor& values) { return values.detach().clone().set_requires_grad(true); }

// One of everything that has the strides of its gradient: scalars, nothing, vectors, tails of a vector register,
// channels last, transposed.
Tensors assorted(torch::Dtype dtype) {
  torch::manual_seed(3);
  Tensors out;
  out.push_back(leaf(torch::randn({})));
  out.push_back(leaf(torch::randn({0, 3})));
  out.push_back(leaf(torch::randn({7})));
  out.push_back(leaf(torch::randn({33, 17})));
  out.push_back(leaf(torch::randn({4, 3, 5, 5}).contiguous(torch::MemoryFormat::ChannelsLast)));
  out.push_back(leaf(torch::randn({6, 40}).t()));
  out.push_back(leaf(torch::randn({128})));
  for (auto& t : out) t = t.detach().to(dtype).set_requires_grad(true);
  return out;
}

// Two equal sets of parameters, one for torch::optim alone and one for FusedStep.
struct Twins {
  Tensors plain, fused;
  explicit Twins(Tensors of) : plain(std::move(of)) {
    for (const auto& t : plain) fused.push_back(leaf(t));
  }
  // The same new gradient for parameter i of both.
  void gradient(std::size_t i) const { gradient(i, torch::empty_like(plain[i]).normal_()); }
  void gradient(std::size_t i, const torch::Tensor& value) const {
    torch::Tensor p = plain[i], f = fused[i];
    p.mutable_grad() = value.detach();
    f.mutable_grad() = value.detach().clone();
  }
  void gradients() const {
    for (std::size_t i = 0; i < plain.size(); ++i) gradient(i);
  }
};

void require_close(const torch::Tensor& a, const torch::Tensor& b, double tolerance) {
  REQUIRE(a.defined() == b.defined());
  if (!a.defined()) return;
  REQUIRE(a.sizes() == b.sizes());
  INFO("largest difference " << (a.numel() ? (a - b).abs().max().item<double>() : 0.0));
  REQUIRE(torch::allclose(a.to(torch::kDouble), b.to(torch::kDouble), tolerance, tolerance));
}
void require_close(const Twins& twins, double tolerance) {
  for (std::size_t i = 0; i < twins.plain.size(); ++i) {
    INFO("parameter " << i);
    require_close(twins.plain[i].detach(), twins.fused[i].detach(), tolerance);
  }
}

std::int64_t counter(Optimizer& optimizer, const torch::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return -1;
  if (auto* s = dynamic_cast<torch::optim::AdamWParamState*>(found->second.get())) return s->step();
  if (auto* s = dynamic_cast<torch::optim::AdamParamState*>(found->second.get())) return s->step();
  if (auto* s = dynamic_cast<torch::optim::AdagradParamState*>(found->second.get())) return s->step();
  return static_cast<torch::optim::SGDParamState&>(*found->second).momentum_buffer().defined();
}
void require_same_counters(const Twins& twins, Optimizer& plain, Optimizer& fused) {
  for (std::size_t i = 0; i < twins.plain.size(); ++i)
    REQUIRE(counter(plain, twins.plain[i]) == counter(fused, twins.fused[i]));
}

using Make = std::function<std::unique_ptr<Optimizer>(Tensors)>;

template <class Class, class Options>
Make making(Options options) {
  return [options](Tensors parameters) { return std::make_unique<Class>(std::move(parameters), options); };
}
std::vector<Make> every_combination() {
  std::vector<Make> all;
  for (const double decay : {0.0, 0.1}) {
    for (const bool amsgrad : {false, true}) {
      all.push_back(
          making<AdamW>(AdamWOptions(0.01).weight_decay(decay).amsgrad(amsgrad).betas({0.8, 0.95}).eps(1e-6)));
      all.push_back(making<Adam>(AdamOptions(0.01).weight_decay(decay).amsgrad(amsgrad)));
    }
    all.push_back(making<SGD>(SGDOptions(0.05).weight_decay(decay)));
    all.push_back(making<SGD>(SGDOptions(0.05).weight_decay(decay).momentum(0.9)));
    all.push_back(making<SGD>(SGDOptions(0.05).weight_decay(decay).momentum(0.9).dampening(0.3)));
    all.push_back(making<SGD>(SGDOptions(0.05).weight_decay(decay).momentum(0.9).nesterov(true)));
    for (const double lr_decay : {0.0, 0.2})
      all.push_back(
          making<Adagrad>(AdagradOptions(0.05).weight_decay(decay).lr_decay(lr_decay).initial_accumulator_value(0.1)));
  }
  return all;
}

void set_rate(Optimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(rate);
}

}  // namespace

TEST_CASE("FusedStep follows torch::optim through every combination of options") {
  const auto dtype = GENERATE(torch::kFloat, torch::kDouble);
  for (const Make& make : every_combination()) {
    const Twins twins(assorted(dtype));
    const auto plain = make(twins.plain), fused = make(twins.fused);
    FusedStep step;
    for (std::size_t n = 0; n < 30; ++n) {
      for (std::size_t i = 0; i < twins.plain.size(); ++i)
        if ((7 * n + 3 * i) % 5 != 0) twins.gradient(i);  // some have none: their counters fall behind
      set_rate(*plain, 0.02 / static_cast<double>(n + 1)), set_rate(*fused, 0.02 / static_cast<double>(n + 1));
      plain->step();
      step.step(*fused);
      REQUIRE(step.reason() == "fused kernels");
      plain->zero_grad(), fused->zero_grad();
    }
    require_same_counters(twins, *plain, *fused);
    require_close(twins, dtype == torch::kDouble ? 1e-9 : 2e-5);
  }
}

TEST_CASE("FusedStep is as exact as torch::optim in half precision") {
  const auto dtype = GENERATE(torch::kBFloat16, torch::kHalf);
  const std::vector<Make> makes = {making<AdamW>(AdamWOptions(0.01).weight_decay(0.1).eps(1e-3)),
                                   making<Adam>(AdamOptions(0.01).eps(1e-3).amsgrad(true)),
                                   making<SGD>(SGDOptions(0.05)),
                                   making<SGD>(SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(0.1)),
                                   making<Adagrad>(AdagradOptions(0.05).weight_decay(0.1))};
  for (const Make& make : makes) {
    const Twins twins(assorted(dtype));
    Tensors exact;
    for (const auto& t : twins.plain) exact.push_back(leaf(t.to(torch::kDouble)));
    const auto plain = make(twins.plain), fused = make(twins.fused), reference = make(exact);
    FusedStep step;
    for (int n = 0; n < 10; ++n) {
      twins.gradients();
      for (std::size_t i = 0; i < exact.size(); ++i) exact[i].mutable_grad() = twins.plain[i].grad().to(torch::kDouble);
      plain->step(), step.step(*fused), reference->step();
    }
    for (std::size_t i = 0; i < exact.size(); ++i) {
      if (exact[i].numel() == 0) continue;
      const auto error = [&](const torch::Tensor& t) { return (t - exact[i]).abs().max().item<double>(); };
      INFO("parameter " << i << ": " << error(twins.fused[i]) << " against " << error(twins.plain[i]));
      REQUIRE(error(twins.fused[i]) <= 1.5 * error(twins.plain[i]) + 0.005);
    }
    const bool sgd = dynamic_cast<SGD*>(fused.get()) != nullptr;  // its kernel was wrong before 2.14
    REQUIRE((step.reason() == "fused kernels") == (!sgd || TORCH_VERSION_MINOR >= 14));
  }
}

TEST_CASE("FusedStep and torch::optim take over from each other in mid-run") {
  for (const Make& make : every_combination()) {
    const Twins twins(assorted(torch::kFloat));
    const auto plain = make(twins.plain), fused = make(twins.fused);
    FusedStep step;
    for (int n = 0; n < 12; ++n) {
      twins.gradients();
      plain->step();
      if (n / 3 % 2 == 0) step.step(*fused);
      else fused->step();
    }
    require_same_counters(twins, *plain, *fused);
    require_close(twins, 2e-5);
  }
}

TEST_CASE("FusedStep reads the options at every step") {
  SECTION("momentum, dampening, nesterov and decay of SGD") {
    const Twins twins(assorted(torch::kFloat));
    SGD plain(twins.plain, SGDOptions(0.05)), fused(twins.fused, SGDOptions(0.05));
    FusedStep step;
    for (int n = 0; n < 16; ++n) {
      for (SGD* each : {&plain, &fused}) {
        auto& options = static_cast<SGDOptions&>(each->param_groups()[0].options());
        options.momentum(n / 3 % 2 ? 0.9 : 0.0)
            .nesterov(n % 4 == 0)
            .dampening(n % 2 ? 0.2 : 0.0)
            .weight_decay(0.01 * n);
      }
      twins.gradients();
      plain.step(), step.step(fused);
    }
    require_close(twins, 2e-5);
  }
  SECTION("amsgrad that starts late, which torch::optim does not survive, starts from zero") {
    const Twins twins(assorted(torch::kFloat));
    Adam plain(twins.plain, AdamOptions(0.01).amsgrad(true)), fused(twins.fused, AdamOptions(0.01).amsgrad(true));
    auto& options = static_cast<AdamOptions&>(fused.param_groups()[0].options());
    FusedStep step;
    options.amsgrad(false);
    twins.gradients();
    step.step(fused);
    options.amsgrad(true);
    twins.gradients();
    step.step(fused);
    auto& state = static_cast<torch::optim::AdamParamState&>(*fused.state().at(twins.fused[3].unsafeGetTensorImpl()));
    REQUIRE(state.max_exp_avg_sq().equal(state.exp_avg_sq()));
  }
}

TEST_CASE("FusedStep takes groups that are added in mid-run, each with its own options") {
  const Twins twins(assorted(torch::kFloat)), more(assorted(torch::kFloat));
  AdamW plain(twins.plain, AdamWOptions(0.01)), fused(twins.fused, AdamWOptions(0.01));
  FusedStep step;
  for (int n = 0; n < 12; ++n) {
    if (n == 5)
      for (auto [optimizer, group] : {std::pair{&plain, &more.plain}, std::pair{&fused, &more.fused}}) {
        optimizer->add_param_group(OptimizerParamGroup(*group));
        static_cast<AdamWOptions&>(optimizer->param_groups()[1].options()).lr(0.05).weight_decay(0.2).amsgrad(true);
      }
    twins.gradients(), more.gradients();
    plain.step(), step.step(fused);
  }
  require_close(twins, 2e-5), require_close(more, 2e-5);
  require_same_counters(more, plain, fused);

  SECTION("Adagrad too, where torch::optim fails") {
    Adagrad optimizer({leaf(torch::ones({3}))}, AdagradOptions(0.1).initial_accumulator_value(0.5));
    auto late = leaf(torch::ones({3}));
    optimizer.add_param_group(OptimizerParamGroup({late}));
    late.mutable_grad() = torch::ones({3});
    step.step(optimizer);
    require_close(late.detach(), torch::full({3}, 1 - 0.1 / std::sqrt(1.5)), 1e-6);
  }
}

TEST_CASE("FusedStep leaves parameters without gradients alone") {
  const Twins twins({leaf(torch::ones({3})), leaf(torch::ones({4}))});
  AdamW optimizer(twins.fused, AdamWOptions(0.1));
  twins.gradient(1);
  twins.plain[0].set_requires_grad(false);
  FusedStep step;
  REQUIRE(step.reason() == "no step yet");
  step.step(optimizer);
  REQUIRE(twins.fused[0].detach().equal(torch::ones({3})));
  REQUIRE(optimizer.state().size() == 1);

  SECTION("and SGD without momentum without state, so that torch::optim can start one") {
    SGD sgd(twins.fused, SGDOptions(0.1));
    step.step(sgd);
    REQUIRE(sgd.state().empty());
  }
}

namespace {

// A sound group 0, the group in question as group 1, a sound group 2: stepped side by side by torch::optim and
// FusedStep. Group 1 must come out bit for bit as torch::optim does it, and the others through kernels.
template <class Class, class Options>
void require_refused(const Options& options, const Twins& bad, const std::vector<torch::Tensor>& gradients,
                     const std::string& why, const std::function<void(Optimizer&, const Tensors&)>& prepare = {}) {
  const Twins first(assorted(torch::kFloat)), last(assorted(torch::kFloat));
  Class plain({OptimizerParamGroup(first.plain), OptimizerParamGroup(bad.plain), OptimizerParamGroup(last.plain)},
              options);
  Class fused({OptimizerParamGroup(first.fused), OptimizerParamGroup(bad.fused), OptimizerParamGroup(last.fused)},
              options);
  const auto* const held = &fused.param_groups()[1].options();
  if (prepare) prepare(plain, bad.plain), prepare(fused, bad.fused);
  FusedStep step;
  for (int n = 0; n < 3; ++n) {
    first.gradients(), last.gradients();
    for (std::size_t i = 0; i < bad.plain.size(); ++i) {
      torch::Tensor p = bad.plain[i], f = bad.fused[i];
      p.mutable_grad() = gradients[i], f.mutable_grad() = gradients[i];
    }
    plain.step();
    step.step(fused);
    REQUIRE(step.reason() == "torch::optim for group 1: " + why);
  }
  for (std::size_t i = 0; i < bad.plain.size(); ++i) REQUIRE(bad.plain[i].equal(bad.fused[i]));
  require_close(first, 2e-5), require_close(last, 2e-5);
  require_same_counters(first, plain, fused), require_same_counters(bad, plain, fused);
  REQUIRE(fused.param_groups().size() == 3);
  REQUIRE(&fused.param_groups()[1].options() == held);
}

}  // namespace

TEST_CASE("FusedStep leaves a group to torch::optim where a kernel would be wrong, and only that group") {
  const auto weight = [] { return leaf(torch::randn({4, 6})); };
  const SGDOptions sgd = SGDOptions(0.1).momentum(0.9);
  SECTION("strides of the gradient") {
    require_refused<AdamW>(AdamWOptions(0.1), Twins({weight()}), {torch::randn({6, 4}).t()},
                           "a parameter and its gradient differ in strides");
  }
  SECTION("strides of the state") {
    const auto transposed = [](Optimizer& optimizer, const Tensors& parameters) {
      auto state = std::make_unique<torch::optim::AdamWParamState>();
      state->exp_avg(torch::ones({6, 4}).t()), state->exp_avg_sq(torch::ones({4, 6}));
      optimizer.state()[parameters[0].unsafeGetTensorImpl()] = std::move(state);
    };
    require_refused<AdamW>(AdamWOptions(0.1), Twins({weight()}), {torch::randn({4, 6})},
                           "a parameter and its state differ in strides", transposed);
  }
  SECTION("dtype of the state") {
    const auto wide = [](Optimizer& optimizer, const Tensors& parameters) {
      auto state = std::make_unique<torch::optim::SGDParamState>();
      state->momentum_buffer(torch::ones({4, 6}, torch::kDouble));
      optimizer.state()[parameters[0].unsafeGetTensorImpl()] = std::move(state);
    };
    require_refused<SGD>(sgd, Twins({weight()}), {torch::randn({4, 6})}, "a parameter and its state differ in dtype",
                         wide);
  }
  SECTION("sparse gradients") {
    require_refused<SGD>(SGDOptions(0.1), Twins({weight()}), {torch::eye(4, 6).to_sparse()}, "a gradient is sparse");
    require_refused<Adagrad>(AdagradOptions(0.1), Twins({weight()}), {torch::eye(4, 6).to_sparse()},
                             "a gradient is sparse");
  }
  SECTION("complex numbers") {
    const auto phase = torch::randn({4, 6}, torch::kComplexFloat);
    require_refused<SGD>(sgd, Twins({leaf(phase)}), {torch::randn({4, 6}, torch::kComplexFloat)},
                         "a parameter is complex");
  }
  SECTION("dtype of the gradient") {
    require_refused<SGD>(sgd, Twins({weight()}), {torch::randn({4, 6}, torch::kDouble)},
                         "a parameter and its gradient differ in dtype");
  }
  SECTION("gaps in memory") {
    Twins twins({weight()});
    twins.plain[0] = torch::randn({4, 12}).narrow(1, 3, 6).detach().set_requires_grad(true);
    twins.fused[0] = torch::zeros({4, 12}).narrow(1, 3, 6).copy_(twins.plain[0].detach()).set_requires_grad(true);
    require_refused<SGD>(sgd, twins, {torch::randn({4, 6})}, "the memory of a parameter overlaps itself or has gaps");
  }
  SECTION("a tied parameter that is listed twice") {
    Twins twins({weight(), weight()});
    twins.plain[1] = twins.plain[0], twins.fused[1] = twins.fused[0];
    const auto gradient = torch::randn({4, 6});
    require_refused<AdamW>(AdamWOptions(0.1), twins, {gradient, gradient}, "two of its parameters share memory");
  }
  SECTION("views of one another") {
    Twins twins({weight(), weight()});
    const auto rows = [](const torch::Tensor& of) { return of.detach().narrow(0, 2, 2).set_requires_grad(true); };
    twins.plain[1] = rows(twins.plain[0]), twins.fused[1] = rows(twins.fused[0]);
    require_refused<SGD>(sgd, twins, {torch::randn({4, 6}), torch::randn({2, 6})},
                         "two of its parameters share memory");
  }
  SECTION("options that it does not know") {
    const auto negative = [](Optimizer& optimizer, const Tensors&) {
      static_cast<SGDOptions&>(optimizer.param_groups()[1].options()).momentum(-0.5);
    };
    require_refused<SGD>(sgd, Twins({weight()}), {torch::randn({4, 6})}, "its momentum is negative", negative);
  }
}

TEST_CASE("FusedStep uses kernels again when the reason is gone") {
  const Twins twins({leaf(torch::randn({4, 6})), leaf(torch::randn({4, 6}))});
  AdamW plain(twins.plain, AdamWOptions(0.1)), fused(twins.fused, AdamWOptions(0.1));
  FusedStep step;
  for (int n = 0; n < 6; ++n) {
    twins.gradients();
    if (n % 2) twins.gradient(1, torch::randn({6, 4}).t());
    plain.step(), step.step(fused);
    REQUIRE((step.reason() == "fused kernels") == (n % 2 == 0));
  }
  require_same_counters(twins, plain, fused);
  require_close(twins, 2e-5);
}

TEST_CASE("FusedStep: strides that differ in dimensions of size 1 only are the same memory") {
  const Twins twins({leaf(torch::randn({8, 4, 1, 1}).as_strided({8, 4, 1, 1}, {4, 1, 4, 4}))});
  REQUIRE(twins.plain[0].stride(2) != 1);
  AdamW plain(twins.plain, AdamWOptions(0.1)), fused(twins.fused, AdamWOptions(0.1));
  FusedStep step;
  for (int n = 0; n < 5; ++n) {
    twins.gradient(0, torch::randn({8, 4, 1, 1}));
    plain.step(), step.step(fused);
  }
  REQUIRE(step.reason() == "fused kernels");
  require_close(twins, 2e-5);
}

TEST_CASE("FusedStep: groups that share a parameter are stepped one after the other") {
  const Twins twins({leaf(torch::randn({5}))});
  SGD plain({OptimizerParamGroup(twins.plain), OptimizerParamGroup(twins.plain)}, SGDOptions(0.1).momentum(0.9));
  SGD fused({OptimizerParamGroup(twins.fused), OptimizerParamGroup(twins.fused)}, SGDOptions(0.1).momentum(0.9));
  FusedStep step;
  for (int n = 0; n < 4; ++n) {
    twins.gradients();
    plain.step(), step.step(fused);
  }
  REQUIRE(step.reason() == "fused kernels");
  require_close(twins, 1e-5);
}

TEST_CASE("FusedStep makes one call and one counter of all parameters of one kind") {
  Tensors parameters;
  for (int i = 0; i < 60; ++i) parameters.push_back(leaf(torch::randn({3 + i})));
  const Twins twins(std::move(parameters));
  AdamW optimizer(twins.fused, AdamWOptions(0.1));
  FusedStep step;
  twins.gradients(), step.step(optimizer);
  twins.gradients();
  const Operators operators;
  step.step(optimizer);
  REQUIRE(operators["aten::_fused_adamw_"] == 1);
  REQUIRE(operators["aten::fill_"] == 0);
  REQUIRE(operators["aten::empty"] == 0);
}

TEST_CASE("FusedStep gives the same bits on one thread and on several, which small tensors are dealt out to") {
  const auto trained = [](int threads) {
    const int before = at::get_num_threads();
    at::set_num_threads(threads);
    torch::manual_seed(5);
    Tensors parameters;
    for (int i = 0; i < 37; ++i) parameters.push_back(leaf(torch::randn({1 + 61 * i})));
    parameters.push_back(leaf(torch::randn({40000})));  // not a small one
    parameters.push_back(leaf(torch::randn({9}, torch::kDouble)));
    AdamW optimizer(parameters, AdamWOptions(0.1));
    FusedStep step;
    for (int n = 0; n < 3; ++n) {
      for (auto& p : parameters) p.mutable_grad() = torch::randn_like(p);
      parameters[static_cast<std::size_t>(n)].mutable_grad().reset();  // counters of two kinds
      step.step(optimizer);
      REQUIRE(step.reason() == "fused kernels");
    }
    at::set_num_threads(before);
    for (auto& p : parameters) p = p.detach();
    return parameters;
  };
  const Tensors one = trained(1);
  for (const int threads : {2, 3, 5}) {
    const Tensors several = trained(threads);
    for (std::size_t i = 0; i < one.size(); ++i) REQUIRE(one[i].equal(several[i]));
  }
}

TEST_CASE("FusedStep tells autograd that the parameters changed") {
  const Twins twins({leaf(torch::randn({5}))});
  AdamW optimizer(twins.fused, AdamWOptions(0.1));
  const torch::Tensor loss = twins.fused[0].square().sum();  // its backward needs the parameter as it was
  twins.gradients();
  FusedStep().step(optimizer);
  REQUIRE_THROWS_WITH(loss.backward(), ContainsSubstring("modified by an inplace operation"));
}

TEST_CASE("FusedStep copies no gradient, in whatever order its elements lie") {
  const Twins twins({leaf(torch::randn({4, 3, 5, 5}).contiguous(torch::MemoryFormat::ChannelsLast)),
                     leaf(torch::randn({6, 40}).t())});
  AdamW plain(twins.plain, AdamWOptions(0.1)), fused(twins.fused, AdamWOptions(0.1));
  FusedStep step;
  for (int n = 0; n < 3; ++n) {
    twins.gradients();
    plain.step();
    const Operators operators;
    step.step(fused);
    REQUIRE(operators["aten::copy_"] == 0);
    REQUIRE(operators["aten::clone"] == 0);
    REQUIRE(operators["aten::contiguous"] == 0);
  }
  require_close(twins, 2e-5);
}

TEST_CASE("FusedStep holds no gradient after a step") {
  const Twins twins({leaf(torch::randn({5})), leaf(torch::randn({5}))});
  SGD optimizer({OptimizerParamGroup({twins.fused[0]}), OptimizerParamGroup({twins.fused[1]})}, SGDOptions(0.1));
  FusedStep step;
  twins.gradients();
  step.step(optimizer);
  REQUIRE(twins.fused[0].grad().use_count() == 1);
  REQUIRE(twins.fused[1].grad().use_count() == 1);
}

TEST_CASE("FusedStep survives a step that throws") {
  const Twins twins({leaf(torch::randn({4, 6})), leaf(torch::randn({4, 6}))});
  Adam optimizer({OptimizerParamGroup({twins.fused[0]}), OptimizerParamGroup({twins.fused[1]})}, AdamOptions(0.1));
  FusedStep step;
  twins.gradients();
  twins.gradient(1, torch::eye(4, 6).to_sparse());  // Adam has no sparse step
  REQUIRE_THROWS_WITH(step.step(optimizer), ContainsSubstring("sparse"));
  REQUIRE(optimizer.param_groups().size() == 2);
  REQUIRE(optimizer.param_groups()[1].params()[0].is_same(twins.fused[1]));
  twins.gradients();
  step.step(optimizer);
  REQUIRE(step.reason() == "fused kernels");
}

namespace {

struct Halved : AdamW {
  using AdamW::AdamW;
  torch::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& p : param_groups()[0].params()) p.mul_(0.5);
    return {};
  }
};
struct Foreign {
  int steps = 0;
  void step() { ++steps; }
};

}  // namespace

TEST_CASE("FusedStep leaves other optimizers to themselves") {
  const Twins twins({leaf(torch::ones({5}))});
  FusedStep step;
  twins.gradients();
  const std::string unknown = "torch::optim for all groups: the class of this optimizer has no fused kernel";
  SECTION("RMSprop") {
    torch::optim::RMSprop plain(twins.plain), fused(twins.fused);
    plain.step(), step.step(fused);
    REQUIRE(twins.plain[0].equal(twins.fused[0]));
    REQUIRE(step.reason() == unknown);
  }
  SECTION("a derived class, through its base") {
    Halved halved(twins.fused, AdamWOptions(0.1));
    step.step(static_cast<AdamW&>(halved));
    REQUIRE(twins.fused[0].detach().equal(torch::full({5}, 0.5)));
    REQUIRE(step.reason() == unknown);
  }
  SECTION("one of another library") {
    Foreign foreign;
    step.step(foreign);
    REQUIRE(foreign.steps == 1);
  }
  SECTION("known ones are known through the base class") {
    AdamW optimizer(twins.fused, AdamWOptions(0.1));
    step.step(static_cast<Optimizer&>(optimizer));
    REQUIRE(step.reason() == "fused kernels");
  }
  SECTION("all, when it is switched off") {
    AdamW plain(twins.plain, AdamWOptions(0.1)), fused(twins.fused, AdamWOptions(0.1));
    FusedStep off({.stepping = frugal::Stepping::plain});
    plain.step(), off.step(fused);
    REQUIRE(twins.plain[0].equal(twins.fused[0]));
    REQUIRE(off.reason() == "torch::optim for all groups: switched off");
  }
}

TEST_CASE("FusedStep is the update policy of update(), which steps only what did not overflow") {
  static_assert(frugal::UpdatePolicy<FusedStep, AdamW>);
  static_assert(std::is_nothrow_move_constructible_v<FusedStep>);
  const Twins twins({leaf(torch::ones({5}))});
  AdamW optimizer(twins.fused, AdamWOptions(0.1));
  frugal::AmpPolicy<frugal::Fp16> amp(torch::kCPU, frugal::Capability{.device = torch::kCPU, .cpu_fp16 = true});
  FusedStep first, fused = std::move(first);
  const auto step = [&](double value) {
    REQUIRE(frugal::backward((twins.fused[0] * value).sum(), 1, amp, fused));
    return frugal::update(optimizer, fused, amp);
  };
  REQUIRE(step(1.0) == frugal::StepResult::applied);
  REQUIRE(fused.reason() == "fused kernels");
  const auto before = twins.fused[0].detach().clone();
  REQUIRE(step(std::numeric_limits<double>::infinity()) == frugal::StepResult::skipped);
  REQUIRE(twins.fused[0].detach().equal(before));
  REQUIRE(counter(optimizer, twins.fused[0]) == 1);
  REQUIRE_FALSE(twins.fused[0].grad().defined());
}
