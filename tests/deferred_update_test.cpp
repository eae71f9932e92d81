// update() with FusedStep leaves gradients as they are until the step: what comes out is what the passes one after the
// other give, and whoever looks at gradients gets the true ones.
#include "support/catch.hpp"
#include "support/one_thread.hpp"
#include "support/operators.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/fused_step.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/grad_clip.hpp>
#include <frugal/observers.hpp>
#include <frugal/trainer.hpp>
#include <frugal/update.hpp>

#include <ATen/Parallel.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

using namespace frugal;
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

constexpr double infinity = std::numeric_limits<double>::infinity();
using Tensors = std::vector<torch::Tensor>;
using Groups = std::vector<Tensors>;

torch::Tensor leaf(const torch::Tensor& values) { return values.detach().clone().set_requires_grad(true); }

AmpPolicy<Fp16> fp16(double scale) {
  return AmpPolicy<Fp16>(at::kCPU, Capability{.device = at::kCPU, .cpu_fp16 = true}, {.scaler = {.init_scale = scale}});
}

// An accumulation policy that says what the gradients must be multiplied by.
struct Factor {
  static constexpr Role role = Role::accumulation;
  double value = 1;
  bool backward(auto&& loss, double) { return loss.backward(), true; }
  double factor() const { return value; }
  bool pending() const { return false; }
  void finish() {}
};

// Two equal models, so to speak: `later` is updated by update(), `at_once` by one pass after the other.
class Twins {
 public:
  explicit Twins(Groups groups, std::function<std::unique_ptr<Optimizer>(std::vector<OptimizerParamGroup>)> make)
      : later_groups(groups) {
    std::vector<std::pair<void*, torch::Tensor>> known;  // a parameter that is listed twice is one in the copy, too
    for (Tensors& group : groups)
      for (torch::Tensor& parameter : group) {
        const auto key = static_cast<void*>(parameter.unsafeGetTensorImpl());
        const auto found = std::ranges::find(known, key, &std::pair<void*, torch::Tensor>::first);
        parameter = found != known.end() ? found->second : known.emplace_back(key, leaf(parameter)).second;
      }
    at_once_groups = groups;
    later = make({later_groups.begin(), later_groups.end()});
    at_once = make({at_once_groups.begin(), at_once_groups.end()});
  }

  // New gradients for both. `change` may do something to the last one.
  void gradients(double size, const std::function<void(torch::Tensor&)>& change = {}) {
    for (std::size_t g = 0; g < later_groups.size(); ++g)
      for (std::size_t i = 0; i < later_groups[g].size(); ++i) {
        torch::Tensor &one = later_groups[g][i], &other = at_once_groups[g][i];
        torch::Tensor gradient = torch::empty_like(one).normal_() * size;
        if (change && g + 1 == later_groups.size() && i + 1 == later_groups[g].size()) change(gradient);
        one.mutable_grad() = gradient.detach(), other.mutable_grad() = gradient.detach().clone();
      }
  }
  // The reference: true gradients, clipped as LibTorch does, one step.
  double step_at_once(double factor, std::optional<double> max_norm, FusedStep& fused) {
    const torch::NoGradGuard off;
    Tensors all;
    for (Tensors& group : at_once_groups)
      for (torch::Tensor& parameter : group)
        if (std::ranges::none_of(all, [&](const torch::Tensor& known) { return known.is_same(parameter); }))
          all.push_back(parameter);
    for (torch::Tensor& parameter : all) {
      if (parameter.grad().is_sparse()) parameter.mutable_grad() = parameter.grad().coalesce();
      auto values = parameter.grad().is_sparse() ? parameter.grad()._values() : parameter.grad();
      values.mul_(factor);
    }
    double squares = 0;
    for (torch::Tensor& parameter : all) {
      const torch::Tensor gradient = parameter.grad().is_sparse() ? parameter.grad()._values() : parameter.grad();
      squares += gradient.to(torch::kDouble).square().sum().item<double>();
    }
    const double norm = std::sqrt(squares), coefficient = max_norm ? *max_norm / (norm + 1e-6) : 1;
    if (coefficient < 1)
      for (torch::Tensor& parameter : all) {
        auto values = parameter.grad().is_sparse() ? parameter.grad()._values() : parameter.grad();
        values.mul_(coefficient);
      }
    fused.step(*at_once);
    at_once->zero_grad();
    return norm;
  }
  double difference() const {
    double largest = 0;
    for (std::size_t g = 0; g < later_groups.size(); ++g)
      for (std::size_t i = 0; i < later_groups[g].size(); ++i)
        if (later_groups[g][i].numel() > 0)
          largest = std::max(largest, (later_groups[g][i].detach().to(torch::kDouble) -
                                       at_once_groups[g][i].detach().to(torch::kDouble))
                                          .abs()
                                          .max()
                                          .item<double>());
    return largest;
  }

  Groups later_groups, at_once_groups;
  std::unique_ptr<Optimizer> later, at_once;
};

template <class Class, class Options>
auto making(Options options) {
  return [options](std::vector<OptimizerParamGroup> groups) {
    return std::make_unique<Class>(std::move(groups), options);
  };
}
using Make = std::function<std::unique_ptr<Optimizer>(std::vector<OptimizerParamGroup>)>;
std::vector<Make> every_class() {
  return {making<AdamW>(AdamWOptions(0.01).weight_decay(0.1)),
          making<Adam>(AdamOptions(0.01).amsgrad(true)),
          making<SGD>(SGDOptions(0.05)),
          making<SGD>(SGDOptions(0.05).momentum(0.9).dampening(0.3).weight_decay(0.1)),
          making<SGD>(SGDOptions(0.05).momentum(0.9).nesterov(true)),
          making<Adagrad>(AdagradOptions(0.05)),
          making<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01))};
}

Groups two_groups(torch::Dtype dtype = torch::kFloat) {
  torch::manual_seed(3);
  const auto some = [&](std::vector<std::int64_t> shape) { return leaf(torch::randn(shape).to(dtype)); };
  return {{some({33, 17}), some({}), some({0, 3})}, {some({7}), some({4, 3, 5, 5})}};
}

// A step of update() with the scale and the factor that the gradients carry.
StepResult step_later(Twins& twins, auto&... policies) { return update(*twins.later, policies...); }

}  // namespace

TEST_CASE("a deferred update of scaled gradients has the bits of an update in passes") {
  for (const Make& make : every_class())
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      Twins twins(two_groups(dtype), make);
      FusedStep later, at_once;
      AmpPolicy<Fp16> amp = fp16(1024);
      for (int n = 0; n < 5; ++n) {
        twins.gradients(1024);
        CHECK(step_later(twins, amp, later) == StepResult::applied);
        twins.step_at_once(1.0 / 1024, {}, at_once);
        CHECK(twins.difference() == 0);
        CHECK(later.reason() == at_once.reason());
      }
    }
}

TEST_CASE("a deferred update that normalises and clips is the one in passes but for rounding") {
  const double factor = GENERATE(0.7, -0.7);
  for (const Make& make : every_class())
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      Twins twins(two_groups(dtype), make);
      FusedStep later, at_once;
      AmpPolicy<Fp16> amp = fp16(1024);
      Factor uneven{factor};
      GradClip clip(1.0);
      const double tolerance = dtype == torch::kDouble ? 1e-12 : 1e-6;
      for (const double size : {1024.0, 20.0, 3000.0}) {  // the second one is short enough
        twins.gradients(size);
        CHECK(step_later(twins, amp, uneven, clip, later) == StepResult::applied);
        const double norm = twins.step_at_once(factor / 1024, 1.0, at_once);
        CHECK(clip.norm() == Approx(norm).epsilon(1e-6));
        CHECK(twins.difference() < tolerance);
      }
    }
}

TEST_CASE("a deferred update writes no gradient before the step, and calls no operator but the kernel's") {
  const OneThread counts_all;
  Twins twins({{leaf(torch::randn({40, 20})), leaf(torch::randn({7}))}}, making<AdamW>(AdamWOptions(0.01)));
  FusedStep fused;
  AmpPolicy<Fp16> amp = fp16(1024);
  GradClip clip(1.0), limit = GradClip::by_value(1e9);
  Factor uneven{0.7};
  const auto counted = [&](auto& clipping) {
    twins.gradients(1e6);
    update(*twins.later, amp, uneven, clipping, fused);
    twins.gradients(1e6);
    const Operators operators;
    update(*twins.later, amp, uneven, clipping, fused);
    CHECK(operators["aten::_fused_adamw_"] == 1);
    CHECK(operators["aten::_foreach_mul_"] == 0);
    CHECK(operators["aten::_foreach_norm"] == 0);
    CHECK(operators["aten::_amp_foreach_non_finite_check_and_unscale_"] == 0);
    CHECK(operators["aten::fill_"] == 0);
    CHECK(operators["aten::empty"] == 0);
    CHECK(operators.reads() == 2);  // of the step number, by the kernel, for each tensor
  };
  counted(clip);
  counted(limit);
}

TEST_CASE("a deferred update steps parameters of 16 bits as one in passes") {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16})
    for (const Make& make :
         {Make(making<AdamW>(AdamWOptions(0.01).eps(1e-3))), Make(making<Adagrad>(AdagradOptions(0.1)))})
      for (const double scale : {65536.0, 1000.0}) {  // half has neither 65536 nor room for much of a thousandth
        Twins twins(two_groups(dtype), make);
        FusedStep later, at_once;
        AmpPolicy<Fp16> amp = fp16(scale);
        for (int n = 0; n < 3; ++n) {
          twins.gradients(1000);
          CHECK(step_later(twins, amp, later) == StepResult::applied);
          twins.step_at_once(1.0 / scale, {}, at_once);
          CHECK(later.reason() == "fused kernels");
          CHECK(twins.difference() == 0);
        }
      }
}

TEST_CASE("a deferred update works where a group falls back to torch::optim, or all do") {
  const auto scaled = [](Twins& twins, FusedStep later, FusedStep at_once,
                         const std::function<void(torch::Tensor&)>& change) {
    AmpPolicy<Fp16> amp = fp16(1024);
    GradClip clip(1.0);
    for (int n = 0; n < 4; ++n) {
      twins.gradients(n % 2 ? 1024 : 1, change);
      CHECK(step_later(twins, amp, clip, later) == StepResult::applied);
      twins.step_at_once(1.0 / 1024, 1.0, at_once);
      CHECK(later.reason() == at_once.reason());
      CHECK(twins.difference() < 1e-6);
    }
    return later.reason();
  };
  SECTION("sparse gradients in the second group") {
    Twins twins({{leaf(torch::randn({7}))}, {leaf(torch::randn({4, 3}))}}, making<SGD>(SGDOptions(0.1)));
    CHECK(scaled(twins, FusedStep(), FusedStep(), [](torch::Tensor& gradient) { gradient = gradient.to_sparse(); }) ==
          "torch::optim for group 1: a gradient is sparse");
  }
  SECTION("strides of a gradient") {
    Twins twins({{leaf(torch::randn({7}))}, {leaf(torch::randn({4, 3}))}}, making<AdamW>(AdamWOptions(0.1)));
    CHECK(scaled(twins, FusedStep(), FusedStep(), [](torch::Tensor& gradient) {
            gradient = gradient.t().contiguous().t();
          }) == "torch::optim for group 1: a parameter and its gradient differ in strides");
  }
  SECTION("switched off") {
    Twins twins(two_groups(), making<AdamW>(AdamWOptions(0.1)));
    const FusedStepOptions plain{.stepping = Stepping::plain};
    scaled(twins, FusedStep(plain), FusedStep(plain), {});
  }
  SECTION("a parameter that is listed twice") {
    const auto tied = leaf(torch::randn({7}));
    Twins twins({{leaf(torch::randn({3})), tied, tied}, {leaf(torch::randn({4, 3}))}},
                making<AdamW>(AdamWOptions(0.1)));
    scaled(twins, FusedStep(), FusedStep(), {});
  }
  SECTION("a parameter that is in two groups") {
    const auto tied = leaf(torch::randn({7}));
    Twins twins({{leaf(torch::randn({3})), tied}, {leaf(torch::randn({4, 3})), tied}},
                making<SGD>(SGDOptions(0.1).momentum(0.9)));
    CHECK(scaled(twins, FusedStep(), FusedStep(), {}) == "fused kernels");
  }
}

TEST_CASE("a deferred update skips an overflow, and nothing moves") {
  const auto with_clip = GENERATE(0, 1, 2);
  for (const double bad : {infinity, -infinity, std::numeric_limits<double>::quiet_NaN()})
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf}) {
      Twins twins({{leaf(torch::randn({70})), leaf(torch::randn({5}).to(dtype))}}, making<AdamW>(AdamWOptions(0.1)));
      FusedStep fused;
      AmpPolicy<Fp16> amp = fp16(1024);
      GradClip clip(1.0), limit = GradClip::by_value(0.1);
      const auto step = [&] {
        if (with_clip == 0) return update(*twins.later, amp, fused);
        return with_clip == 1 ? update(*twins.later, amp, clip, fused) : update(*twins.later, amp, limit, fused);
      };
      amp.scale(torch::ones({}));
      twins.gradients(1);
      CHECK(step() == StepResult::applied);
      const auto& parameter = twins.later_groups[0][0];
      auto& state =
          static_cast<torch::optim::AdamWParamState&>(*twins.later->state().at(parameter.unsafeGetTensorImpl()));
      const torch::Tensor weights = parameter.detach().clone(), moment = state.exp_avg().clone();
      twins.gradients(1, [&](torch::Tensor& gradient) { gradient[3] = bad; });
      CHECK(step() == StepResult::skipped);
      CHECK(parameter.detach().equal(weights));
      CHECK(state.exp_avg().equal(moment));
      CHECK(state.step() == 1);
      CHECK_FALSE(parameter.grad().defined());
      CHECK(amp.skipped() == 1);
      CHECK(amp.scale_factor() == 512);
      amp.scale(torch::ones({}));
      twins.gradients(1);
      CHECK(step() == StepResult::applied);
      CHECK(state.step() == 2);
    }
}

TEST_CASE("a norm that overflows while every gradient is finite is no overflow") {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    Twins twins({{leaf(torch::randn({70}).to(dtype))}}, making<SGD>(SGDOptions(1e-30)));
    FusedStep fused;
    AmpPolicy<Fp16> amp = fp16(1024);
    twins.gradients(1e25);
    CHECK(update(*twins.later, amp, fused) == StepResult::applied);
    twins.gradients(1e25);
    GradClip clip(1.0);
    CHECK(update(*twins.later, amp, clip, fused) == StepResult::applied);
  }
}

TEST_CASE("deferred: any factor, zero and those that no float can divide by included") {
  for (const double factor : {0.0, -0.5, 1e-42, 1e42, 3.0}) {
    Twins twins(two_groups(), making<SGD>(SGDOptions(0.1).momentum(0.9)));
    FusedStep later, at_once;
    Factor odd{factor};
    for (int n = 0; n < 2; ++n) {
      const double size = factor == 0 ? 1 : std::min(1.0 / std::abs(factor), 1e37);
      twins.gradients(size);
      CHECK(update(*twins.later, odd, later) == StepResult::applied);
      twins.step_at_once(factor, {}, at_once);
    }
    INFO(factor);
    CHECK(twins.difference() <= 1e-6);
    CHECK(std::isfinite(twins.difference()));
  }
}

TEST_CASE("deferred: clipping by value clips the true gradients") {
  for (const double factor : {1.0 / 1024, 0.7}) {
    Twins twins({{leaf(torch::zeros({4}))}}, making<SGD>(SGDOptions(1.0)));
    Factor uneven{factor};
    GradClip limit = GradClip::by_value(0.5);
    FusedStep fused;
    twins.gradients(1, [&](torch::Tensor& gradient) {
      gradient = torch::tensor({-8.0, 0.25, 0.0, 0.75}).div(factor).to(torch::kFloat);
    });
    update(*twins.later, uneven, limit, fused);
    CHECK(twins.later_groups[0][0].detach().allclose(torch::tensor({0.5F, -0.25F, 0.0F, -0.5F}), 1e-6, 1e-7));
  }
}

TEST_CASE("deferred: uneven windows, with and without a precision policy") {
  const auto train = [](auto&... policies) {
    torch::manual_seed(1);
    torch::Tensor w = leaf(torch::randn({4}));
    AdamW optimizer(Tensors{w}, AdamWOptions(0.1));
    for (const int samples : {3, 1, 2, 5, 1, 1}) {
      const torch::Tensor loss = (w - torch::randn({samples, 4})).square().sum(1).mean();
      if (backward(loss, samples, policies...)) update(optimizer, policies...);
    }
    return w.detach();
  };
  GradAccumulator reference(3), plain(3), with_amp(3), with_bf16(3);
  FusedStep first, second, third;
  const Capability none{.device = at::kCPU};
  AmpPolicy<Fp16> amp = fp16(1024);
  AmpPolicy<Bf16> bf16(at::kCPU, none);
  const torch::Tensor expected = train(reference);
  CHECK(train(plain, first).allclose(expected, 1e-5, 1e-6));
  CHECK(train(with_amp, amp, second).allclose(expected, 1e-5, 1e-6));
  CHECK(train(bf16, third, with_bf16).allclose(expected, 1e-5, 1e-6));
}

TEST_CASE("deferred: two optimizers on one policy, one of which overflows") {
  Twins first({{leaf(torch::zeros({3}))}}, making<SGD>(SGDOptions(1.0))),
      second({{leaf(torch::zeros({3}))}}, making<SGD>(SGDOptions(1.0)));
  AmpPolicy<Fp16> amp = fp16(1024);
  FusedStep fused;
  GradClip clip(1e9);
  amp.scale(torch::ones({}));
  first.gradients(1, [](torch::Tensor& gradient) { gradient.fill_(1024); });
  second.gradients(1, [](torch::Tensor& gradient) { gradient[1] = infinity; });
  CHECK(update(*first.later, amp, clip, fused) == StepResult::applied);
  CHECK(update(*second.later, amp, clip, fused) == StepResult::skipped);
  CHECK(first.later_groups[0][0].detach().equal(torch::full({3}, -1.0F)));
  CHECK(second.later_groups[0][0].detach().equal(torch::zeros({3})));
  amp.scale(torch::ones({}));
  CHECK(amp.scale_factor() == 512);
}

TEST_CASE("deferred: without a gradient nothing happens") {
  Twins twins(two_groups(), making<AdamW>(AdamWOptions(0.1)));
  AmpPolicy<Fp16> amp = fp16(1024);
  FusedStep fused;
  GradClip clip(1.0);
  CHECK(update(*twins.later, amp, clip, fused) == StepResult::applied);
  CHECK(clip.norm() == 0);
  CHECK(twins.later->state().empty());
  CHECK(twins.difference() == 0);
}

namespace {

// A clipping policy of a user, a precision policy of a user, and one that is derived from ours: all look at gradients.
struct Watching {
  static constexpr Role role = Role::clipping;
  std::vector<double> seen = {};
  void clip(auto& optimizer) {
    seen.push_back(optimizer.param_groups()[0].params()[0].grad()[0].template item<double>());
  }
};
struct WatchingAmp : AmpPolicy<Fp16> {
  std::vector<double> seen = {};
  explicit WatchingAmp(AmpPolicy<Fp16> amp) : AmpPolicy<Fp16>(std::move(amp)) {}
  bool step(auto& optimizer) {
    seen.push_back(optimizer.param_groups()[0].params()[0].grad()[0].template item<double>());
    return AmpPolicy<Fp16>::step(optimizer);
  }
};
struct WatchingClip : GradClip {
  std::vector<double> seen = {};
  explicit WatchingClip(double norm) : GradClip(norm) {}
  void clip(auto& optimizer) {
    GradClip::clip(optimizer);
    seen.push_back(optimizer.param_groups()[0].params()[0].grad()[0].template item<double>());
  }
};
struct OwnPrecision {
  static constexpr Role role = Role::precision;
  int autocast() { return 0; }
  auto scale(const torch::Tensor& loss) { return loss.mul(8.0); }
  void unscale(auto& optimizer, double factor) {
    const torch::NoGradGuard off;
    for (auto& group : optimizer.param_groups())
      for (auto& parameter : group.params()) parameter.mutable_grad().mul_(factor / 8.0);
  }
  bool step(auto& optimizer) { return optimizer.step(), true; }
};

}  // namespace

TEST_CASE("policies that may look at gradients see the true ones") {
  Twins twins({{leaf(torch::zeros({2}))}}, making<SGD>(SGDOptions(1.0)));
  const auto eight = [](torch::Tensor& gradient) { gradient.fill_(8); };
  FusedStep fused;
  AmpPolicy<Fp16> amp = fp16(4);
  twins.gradients(1, eight);
  SECTION("a clipping policy of one's own") {
    Watching clip;
    update(*twins.later, amp, clip, fused);
    CHECK(clip.seen == std::vector<double>{2});
    CHECK(twins.later_groups[0][0].detach().equal(torch::full({2}, -2.0F)));
  }
  SECTION("a class derived from GradClip") {
    WatchingClip clip(1.0);
    update(*twins.later, amp, clip, fused);
    REQUIRE(clip.seen.size() == 1);
    CHECK(clip.seen[0] == Approx(std::sqrt(0.5)));
  }
  SECTION("a class derived from AmpPolicy") {
    WatchingAmp watching(std::move(amp));
    GradClip clip(100);
    update(*twins.later, watching, clip, fused);
    CHECK(watching.seen == std::vector<double>{2});
    CHECK(twins.later_groups[0][0].detach().equal(torch::full({2}, -2.0F)));
  }
  SECTION("a precision policy of one's own") {
    OwnPrecision own;
    GradClip clip(100);
    Factor uneven{0.5};
    update(*twins.later, own, uneven, clip, fused);
    CHECK(clip.norm() == Approx(std::sqrt(0.5)));
    CHECK(twins.later_groups[0][0].detach().equal(torch::full({2}, -0.5F)));
  }
}

TEST_CASE("observers of a Trainer see the true gradients, and without one the Trainer steps alike") {
  const auto train = [](auto... observers) {
    torch::manual_seed(2);
    torch::nn::Linear model(3, 2);
    AdamW optimizer(model->parameters(), AdamWOptions(0.1));
    const auto loss = [](torch::nn::Linear& m, const torch::Tensor& batch) { return m(batch).square().mean(); };
    Trainer trainer{model,
                    optimizer,
                    loss,
                    AmpPolicy<Fp16>(at::kCPU, {.device = at::kCPU, .cpu_fp16 = true}, {.scaler = {.init_scale = 256}}),
                    GradClip(0.01),
                    FusedStep(),
                    observers...};
    for (int n = 0; n < 4; ++n) CHECK(trainer.step(torch::randn({5, 3})) == StepResult::applied);
    return model->weight.detach();
  };
  std::vector<double> seen;
  const torch::Tensor unwatched = train(), watched = train(OnGradients{[&](torch::nn::Linear& model) {
                                             seen.push_back(model->weight.grad().norm().item<double>());
                                           }});
  REQUIRE(seen.size() == 4);
  for (const double norm : seen) CHECK((norm > 0.001 && norm < 5));  // not 256 times that
  CHECK(unwatched.allclose(watched, 1e-5, 1e-6));
}

namespace {

struct Throwing {
  static constexpr Role role = Role::update;
  FusedStep fused = FusedStep();
  bool throws = true;
  void step(auto& optimizer) { fused.step(optimizer); }
  void step(Optimizer& optimizer, const frugal::detail::PendingScale& pending) {
    if (throws) throw std::runtime_error("step");
    fused.step(optimizer, pending);
  }
};

}  // namespace

TEST_CASE("a deferred update that throws drops its window") {
  Twins twins({{leaf(torch::zeros({2}))}}, making<SGD>(SGDOptions(1.0)));
  AmpPolicy<Fp16> amp = fp16(4);
  Throwing step;
  twins.gradients(1);
  CHECK_THROWS_WITH(update(*twins.later, amp, step), "step");
  CHECK_FALSE(twins.later_groups[0][0].grad().defined());
  step.throws = false;
  twins.gradients(1, [](torch::Tensor& gradient) { gradient.fill_(8); });
  CHECK(update(*twins.later, amp, step) == StepResult::applied);
  CHECK(twins.later_groups[0][0].detach().equal(torch::full({2}, -2.0F)));
}

namespace {
struct OwnZero : SGD {
  using SGD::SGD;
  int zeroed = 0;
  void zero_grad(bool = true) { ++zeroed, SGD::zero_grad(); }
};
}  // namespace

TEST_CASE("an update drops the gradients without an operator, and by zero_grad() where that is the optimizer's own") {
  const torch::Tensor weight = leaf(torch::ones({4})), frozen = leaf(torch::ones({2}));
  weight.mutable_grad() = torch::ones({4});
  const torch::Tensor held = weight.grad();
  SECTION("LibTorch's") {
    SGD optimizer({weight, frozen}, SGDOptions(0.5));
    FusedStep fused;
    const Operators counted;
    CHECK(update(optimizer, fused) == StepResult::applied);
    CHECK(counted["aten::detach_"] == 0);
  }
  SECTION("a user's") {
    OwnZero optimizer({weight, frozen}, SGDOptions(0.5));
    CHECK(update(optimizer) == StepResult::applied);
    CHECK(optimizer.zeroed == 1);
  }
  CHECK_FALSE(weight.grad().defined());
  CHECK(torch::equal(weight.detach(), torch::full({4}, 0.5)));
  CHECK(torch::equal(held, torch::ones({4})));
}
