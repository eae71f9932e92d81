#include "support/catch.hpp"
#include "support/operators.hpp"
#include "support/tensor_archive.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/update.hpp>

#include <ATen/autocast_mode.h>  // beside detail/autocast.hpp: the declarations there must be these

#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

using frugal::AmpOptions;
using frugal::AmpPolicy;
using frugal::Auto;
using frugal::Bf16;
using frugal::BitExact;
using frugal::Capability;
using frugal::Fp16;
using frugal::Fp32;
using frugal::Precision;
using frugal::Tf32;

namespace {

const double infinity = std::numeric_limits<double>::infinity();
const Capability able_cpu{.device = at::kCPU, .cpu_bf16 = true, .cpu_fp16 = true};

Capability gpu(int major, int minor = 0) { return {.device = at::kCUDA, .major = major, .minor = minor}; }

// Sets an environment variable for one scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) before_ = old;
    value ? ::setenv(name, value, 1) : ::unsetenv(name);
  }
  Environment(const Environment&) = delete;
  ~Environment() { before_ ? ::setenv(name_, before_->c_str(), 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

struct ClearEnvironment {
  Environment precision{"FRUGAL_PRECISION", nullptr}, exact{"FRUGAL_BIT_EXACT", nullptr},
      workspace{"CUBLAS_WORKSPACE_CONFIG", nullptr};
};

struct Warnings : c10::WarningHandler {
  std::vector<std::string> texts;
  c10::WarningUtils::WarningHandlerGuard guard{this};
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
};

AmpPolicy<Fp16> fp16(frugal::LossScalerOptions scaler = {}) {
  return AmpPolicy<Fp16>(at::kCPU, able_cpu, {.scaler = scaler});
}

at::Tensor weight(std::vector<double> values) { return torch::tensor(values, torch::kFloat).requires_grad_(); }

torch::optim::SGD sgd(std::vector<at::Tensor> parameters, double rate = 1.0) {
  return torch::optim::SGD(std::move(parameters), torch::optim::SGDOptions(rate));
}

}  // namespace

// --- what is chosen ----------------------------------------------------------------------------------------------

TEST_CASE("AmpPolicy: a tag runs where the hardware has it, else in fp32, and the reason says so") {
  ClearEnvironment clear;
  CHECK(AmpPolicy<Fp16>(at::kCUDA, gpu(7)).precision() == Precision::fp16);
  CHECK(AmpPolicy<Fp16>(at::kCUDA, gpu(6, 1)).precision() == Precision::fp32);
  CHECK(AmpPolicy<Fp16>(at::kCUDA, gpu(6, 1)).reason() ==
        "fp32, because fp16 was asked for in code but compute capability 6.1 is below 7.0.");
  CHECK(AmpPolicy<Bf16>(at::kCUDA, gpu(7, 5)).precision() == Precision::fp32);
  CHECK(AmpPolicy<Bf16>(at::kCUDA, gpu(8)).precision() == Precision::bf16);
  CHECK(AmpPolicy<Tf32>(at::kCUDA, gpu(7, 5)).precision() == Precision::fp32);
  CHECK(AmpPolicy<Tf32>(at::kCUDA, gpu(8, 6)).precision() == Precision::tf32);
  CHECK(AmpPolicy<Tf32>(at::kCPU, able_cpu).reason() ==
        "fp32, because tf32 was asked for in code but a CPU has no TF32.");
  CHECK(AmpPolicy<Bf16>(at::kCPU, Capability{at::kCPU}).precision() == Precision::fp32);
  CHECK(AmpPolicy<Bf16>(at::kCPU, able_cpu).reason() == "bf16, asked for in code.");
  CHECK(fp16().reason() == "fp16 with loss scaling, asked for in code.");
  CHECK(AmpPolicy<Fp32>(at::kCUDA, gpu(9)).precision() == Precision::fp32);
  CHECK(AmpPolicy<BitExact>(at::kCPU, able_cpu).precision() == Precision::bit_exact);
}

TEST_CASE("AmpPolicy: Auto takes the fastest precision of the hardware") {
  ClearEnvironment clear;
  CHECK(AmpPolicy<>(at::kCUDA, gpu(9)).precision() == Precision::bf16);
  CHECK(AmpPolicy<>(at::kCUDA, gpu(9)).reason() == "bf16, the fastest of compute capability 9.0.");
  CHECK(AmpPolicy<>(at::kCUDA, gpu(7, 5)).precision() == Precision::fp16);
  CHECK(AmpPolicy<>(at::kCUDA, gpu(6)).precision() == Precision::fp32);
  CHECK(AmpPolicy<>(at::kCPU, able_cpu).precision() == Precision::bf16);
  CHECK(AmpPolicy<>(at::kCPU, Capability{at::kCPU}).precision() == Precision::fp32);
  CHECK(AmpPolicy<>(at::kCPU, Capability{at::kCPU}).reason() ==
        "fp32, because this CPU has neither AVX512-BF16 nor AMX-BF16.");
  CHECK(AmpPolicy<>(at::kCPU).precision() == Capability::of(at::kCPU).best());
}

TEST_CASE("AmpPolicy: the environment sets what Auto becomes, and only Auto") {
  ClearEnvironment clear;
  const auto chosen = [](const char* precision, const char* exact) {
    const Environment a("FRUGAL_PRECISION", precision), b("FRUGAL_BIT_EXACT", exact);
    return AmpPolicy<>(at::kCPU, able_cpu).precision();
  };
  CHECK(chosen("fp32", nullptr) == Precision::fp32);
  CHECK(chosen("fp16", nullptr) == Precision::fp16);
  CHECK(chosen("bf16", "0") == Precision::bf16);
  CHECK(chosen("tf32", nullptr) == Precision::fp32);  // a CPU has none
  CHECK(chosen("auto", nullptr) == Precision::bf16);
  CHECK(chosen("", "") == Precision::bf16);  // empty is unset
  CHECK(chosen("fp16", "1") == Precision::bit_exact);
  CHECK_THROWS_WITH(chosen("FP16", nullptr),
                    ContainsSubstring("FRUGAL_PRECISION is 'FP16'") && ContainsSubstring("bf16"));
  CHECK_THROWS_WITH(chosen("bit_exact", nullptr), ContainsSubstring("FRUGAL_PRECISION"));
  CHECK_THROWS_WITH(chosen(nullptr, "yes"), ContainsSubstring("FRUGAL_BIT_EXACT is 'yes'"));
  CHECK_THROWS(chosen("nonsense", "1"));

  const Environment precision("FRUGAL_PRECISION", "fp16");
  CHECK(AmpPolicy<>(at::kCPU, able_cpu).reason() == "fp16 with loss scaling, asked for by FRUGAL_PRECISION.");
  CHECK(AmpPolicy<>(at::kCPU, able_cpu, {.precision = Precision::bf16}).precision() == Precision::bf16);
  CHECK(AmpPolicy<Fp32>(at::kCPU, able_cpu).precision() == Precision::fp32);
  const Environment wrong("FRUGAL_BIT_EXACT", "wrong");
  CHECK(AmpPolicy<>(at::kCPU, able_cpu, {.precision = Precision::fp32}).precision() == Precision::fp32);
  CHECK(AmpPolicy<Bf16>(at::kCPU, able_cpu).precision() == Precision::bf16);
}

TEST_CASE("AmpPolicy: contradictions in code are errors") {
  CHECK_THROWS_WITH(AmpPolicy<Fp16>(at::kCPU, able_cpu, {.precision = Precision::bf16}),
                    ContainsSubstring("the tag says fp16") && ContainsSubstring("Use Auto"));
  CHECK_NOTHROW(AmpPolicy<Fp16>(at::kCPU, able_cpu, {.precision = Precision::fp16}));
  CHECK_THROWS_WITH(AmpPolicy<Fp32>(at::kCPU, gpu(8)), ContainsSubstring("describes a"));
  CHECK_THROWS_WITH(fp16({.init_scale = 0}), ContainsSubstring("LossScaler"));
  CHECK_NOTHROW(AmpPolicy<Fp32>(at::kMPS));  // needs no hardware, so none is asked
}

TEST_CASE("AmpPolicy: what a tag rules out takes no space") {
  STATIC_REQUIRE(AmpPolicy<Fp16>::can_skip);
  STATIC_REQUIRE(AmpPolicy<Auto>::can_skip);
  STATIC_REQUIRE_FALSE(AmpPolicy<Bf16>::can_skip);
  STATIC_REQUIRE_FALSE(AmpPolicy<Fp32>::can_skip);
  STATIC_REQUIRE_FALSE(AmpPolicy<Tf32>::can_skip);
  STATIC_REQUIRE_FALSE(AmpPolicy<BitExact>::can_skip);
  STATIC_REQUIRE(sizeof(AmpPolicy<Bf16>) + sizeof(frugal::LossScaler) < sizeof(AmpPolicy<Fp16>));
  STATIC_REQUIRE(sizeof(AmpPolicy<Fp32>) == sizeof(AmpPolicy<Bf16>));
  STATIC_REQUIRE(sizeof(frugal::LossScaler) <= 112);
  STATIC_REQUIRE(std::is_nothrow_move_constructible_v<AmpPolicy<Auto>>);
  STATIC_REQUIRE(std::is_move_assignable_v<AmpPolicy<Auto>>);
  STATIC_REQUIRE_FALSE(std::is_copy_constructible_v<AmpPolicy<BitExact>>);
  STATIC_REQUIRE(frugal::PrecisionPolicy<AmpPolicy<Fp16>, torch::optim::Adam>);
  STATIC_REQUIRE(frugal::Stateful<AmpPolicy<Fp16>>);
}

// --- autocast ----------------------------------------------------------------------------------------------------

namespace {

struct AutocastState {
  bool enabled = at::autocast::is_autocast_enabled(at::kCPU), caching = at::autocast::is_autocast_cache_enabled();
  at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  int nesting = (at::autocast::increment_nesting(), at::autocast::decrement_nesting());
  bool operator==(const AutocastState&) const = default;
};

at::ScalarType product_dtype() { return torch::ones({2, 2}).mm(torch::ones({2, 2})).scalar_type(); }

}  // namespace

TEST_CASE("AmpPolicy: autocast computes in the chosen precision and restores every flag, exceptions included") {
  AmpPolicy<Bf16> bf(at::kCPU, able_cpu);
  AmpPolicy<Fp16> half = fp16();
  AmpPolicy<Fp32> full(at::kCPU, able_cpu);
  const AutocastState outside;
  REQUIRE_FALSE(outside.enabled);
  {
    const auto guard = bf.autocast();
    CHECK(product_dtype() == at::kBFloat16);
    const AutocastState inside;
    CHECK(inside.nesting == outside.nesting + 1);
    try {
      const auto inner = half.autocast();
      CHECK(product_dtype() == at::kHalf);
      {
        const auto off = full.autocast();
        CHECK(product_dtype() == at::kFloat);
      }
      CHECK(product_dtype() == at::kHalf);
      throw std::runtime_error("a loss that throws");
    } catch (const std::runtime_error&) {}
    CHECK(AutocastState() == inside);
    CHECK(product_dtype() == at::kBFloat16);
  }
  CHECK(AutocastState() == outside);
  CHECK(product_dtype() == at::kFloat);
}

TEST_CASE("AmpPolicy: a region restores the user's own autocast, dtype and cache flag") {
  AmpPolicy<Fp16> half = fp16();
  AmpPolicy<Fp32> full(at::kCPU, able_cpu);
  const AutocastState before;
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::set_autocast_cache_enabled(false);
  const AutocastState users;
  {
    const auto guard = half.autocast();
    CHECK(product_dtype() == at::kHalf);
    CHECK(at::autocast::is_autocast_cache_enabled());
  }
  CHECK(AutocastState() == users);
  {
    const auto guard = full.autocast();
    CHECK(product_dtype() == at::kFloat);  // AmpPolicy<Fp32> switches it off
  }
  CHECK(AutocastState() == users);
  at::autocast::set_autocast_enabled(at::kCPU, before.enabled);
  at::autocast::set_autocast_dtype(at::kCPU, before.dtype);
  at::autocast::set_autocast_cache_enabled(before.caching);
}

TEST_CASE("AmpPolicy: no cast of an old weight is used after the weight changed") {
  AmpPolicy<Bf16> amp(at::kCPU, able_cpu);
  at::Tensor w = torch::ones({2, 2}).requires_grad_();
  const at::Tensor x = torch::ones({1, 2});
  auto optimizer = sgd({w});
  const auto value = [&] { return x.mm(w).sum().item<float>(); };

  SECTION("step() inside a region") {
    const auto guard = amp.autocast();
    CHECK(value() == 4);
    w.mutable_grad() = torch::ones({2, 2});
    CHECK(amp.step(optimizer));  // w becomes 0
    CHECK(value() == 0);
  }
  SECTION("the user steps between two regions") {
    {
      const auto guard = amp.autocast();
      CHECK(value() == 4);
    }
    w.mutable_grad() = torch::ones({2, 2});
    optimizer.step();
    const auto guard = amp.autocast();
    CHECK(value() == 0);
  }
  SECTION("casts made by the user's own autocast before a region") {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    CHECK(value() == 4);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    w.mutable_grad() = torch::ones({2, 2});
    optimizer.step();
    const auto guard = amp.autocast();
    CHECK(value() == 0);
  }
  SECTION("casts made inside a region, then the user's own autocast") {
    {
      const auto guard = amp.autocast();
      CHECK(value() == 4);
    }
    w.mutable_grad() = torch::ones({2, 2});
    optimizer.step();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    CHECK(value() == 0);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
}

namespace {

struct Throwing {
  static constexpr frugal::Role role = frugal::Role::clipping;
  bool throws;
  void clip(auto&) const {
    if (throws) throw std::runtime_error("clip");
  }
};

}  // namespace

// --- scaling -----------------------------------------------------------------------------------------------------

TEST_CASE("AmpPolicy: the loss is scaled in float32, where 65536 fits") {
  AmpPolicy<Fp16> amp = fp16();
  const at::Tensor scaled = amp.scale(torch::full({}, 2.0, torch::kHalf));
  CHECK(scaled.scalar_type() == at::kFloat);
  CHECK(scaled.item<float>() == 131072.0F);
  CHECK(amp.scale(torch::full({}, 2.0, torch::kDouble)).scalar_type() == at::kDouble);

  AmpPolicy<Bf16> bf(at::kCPU, able_cpu);
  const at::Tensor loss = torch::ones({}, torch::kBFloat16);
  CHECK(bf.scale(loss).is_same(loss));
  CHECK(bf.scale_factor() == 1);
  AmpPolicy<> off(at::kCPU, able_cpu, {.precision = Precision::fp32});
  CHECK(off.scale(loss).is_same(loss));
}

TEST_CASE("AmpPolicy: unscale gives the true gradients times the factor, in one pass and without a read") {
  AmpPolicy<Fp16> amp = fp16();
  at::Tensor w = weight({1, 2});
  auto optimizer = sgd({w});
  amp.scale((w * torch::tensor({3.0F, 5.0F})).sum()).backward();
  CHECK(w.grad()[0].item<float>() == 3 * 65536.0F);
  {
    const Operators operators;
    amp.unscale(optimizer, 0.5);
    CHECK(operators["aten::_amp_foreach_non_finite_check_and_unscale_"] == 1);
    CHECK(operators["aten::mul_"] + operators["aten::_foreach_mul_"] == 0);
    CHECK(operators.reads() == 0);
  }
  CHECK(w.grad().equal(torch::tensor({1.5F, 2.5F})));
  CHECK(amp.step(optimizer));
  CHECK(w.equal(torch::tensor({-0.5F, -0.5F})));
}

TEST_CASE("AmpPolicy: without a scaler the factor is applied alone, and 1 costs nothing") {
  AmpPolicy<Bf16> amp(at::kCPU, able_cpu);
  at::Tensor w = weight({1, 2});
  auto optimizer = sgd({w});
  w.mutable_grad() = torch::tensor({4.0F, 8.0F});
  amp.unscale(optimizer, 0.25);
  CHECK(w.grad().equal(torch::tensor({1.0F, 2.0F})));
  const Operators operators;
  amp.unscale(optimizer);
  CHECK(operators.total() == 0);
}

TEST_CASE("AmpPolicy: step unscales if nobody has") {
  AmpPolicy<Fp16> amp = fp16();
  at::Tensor w = weight({1});
  auto optimizer = sgd({w});
  amp.scale(w.sum()).backward();
  CHECK(amp.step(optimizer));
  CHECK(w.item<float>() == 0);
}

TEST_CASE("AmpPolicy: unscaling twice in one window is an error, per optimizer") {
  AmpPolicy<Fp16> amp = fp16();
  at::Tensor a = weight({1}), b = weight({1});
  auto first = sgd({a}), second = sgd({b});
  for (int window = 0; window < 2; ++window) {
    amp.scale((a + b).sum()).backward();
    amp.unscale(first);
    amp.unscale(second);
    CHECK(a.grad().item<float>() == 1);
    CHECK(b.grad().item<float>() == 1);
    CHECK_THROWS_WITH(amp.unscale(first), ContainsSubstring("twice"));
    amp.scale(a.sum()).backward();  // a micro-batch after unscale(): too late, and no way around the check
    CHECK_THROWS_WITH(amp.unscale(first), ContainsSubstring("twice"));
    CHECK(amp.step(first));
    CHECK(amp.step(second));
    first.zero_grad();
    second.zero_grad();
  }
}

TEST_CASE("AmpPolicy: an overflow skips everything") {
  AmpPolicy<Fp16> amp = fp16({.init_scale = 1024});
  at::Tensor w = weight({1, 2});
  torch::optim::Adam optimizer({w}, torch::optim::AdamOptions(0.1));
  amp.scale(w.square().sum()).backward();
  REQUIRE(amp.step(optimizer));
  optimizer.zero_grad();
  auto& state = static_cast<torch::optim::AdamParamState&>(*optimizer.state().at(w.unsafeGetTensorImpl()));
  const at::Tensor weights = w.detach().clone(), moment = state.exp_avg().clone();

  for (const double bad : {infinity, -infinity, std::numeric_limits<double>::quiet_NaN()}) {
    amp.scale((w.square() * torch::tensor({1.0, bad}, torch::kFloat)).sum()).backward();
    amp.unscale(optimizer);
    CHECK_FALSE(amp.step(optimizer));
    optimizer.zero_grad();
  }
  CHECK(w.equal(weights));
  CHECK(state.exp_avg().equal(moment));
  CHECK(state.step() == 1);
  CHECK(amp.skipped() == 3);
  CHECK(amp.scale_factor() == 128);

  amp.scale(w.square().sum()).backward();
  CHECK(amp.step(optimizer));
  CHECK(state.step() == 2);
  CHECK_FALSE(w.equal(weights));
}

TEST_CASE("AmpPolicy: the scale never moves inside a window") {
  AmpPolicy<Fp16> amp = fp16({.init_scale = 8, .growth_interval = 1});
  at::Tensor w = weight({1});
  auto optimizer = sgd({w});
  const auto scale_of = [&] { return amp.scale(torch::ones({})).item<double>(); };
  for (int micro_batch = 0; micro_batch < 4; ++micro_batch) CHECK(scale_of() == 8);
  w.mutable_grad() = torch::ones({1});
  amp.unscale(optimizer);
  CHECK(amp.scale_factor() == 8);
  CHECK(scale_of() == 8);
  CHECK(amp.step(optimizer));
  CHECK(amp.scale_factor() == 16);  // what the next scale() uses
  for (int micro_batch = 0; micro_batch < 4; ++micro_batch) CHECK(scale_of() == 16);
  w.mutable_grad() = torch::full({1}, infinity);
  CHECK_FALSE(amp.step(optimizer));
  CHECK(scale_of() == 8);
  CHECK(scale_of() == 8);
}

TEST_CASE("AmpPolicy: with several optimizers the scale changes once, for all that stepped") {
  AmpPolicy<Fp16> amp = fp16({.init_scale = 64});
  at::Tensor a = weight({1}), b = weight({1});
  auto first = sgd({a}), second = sgd({b});
  const auto window = [&](double of_a, double of_b) {
    amp.scale(torch::ones({}));
    a.mutable_grad() = torch::full({1}, of_a);
    b.mutable_grad() = torch::full({1}, of_b);
    const bool applied = amp.step(first);
    return std::pair(applied, amp.step(second));
  };
  CHECK(window(infinity, infinity) == std::pair(false, false));
  CHECK(amp.scale_factor() == 32);
  CHECK(amp.skipped() == 1);
  CHECK(window(infinity, 32) == std::pair(false, true));  // the one that overflowed skips alone
  CHECK(a.item<float>() == 1);
  CHECK(b.item<float>() == 0);
  CHECK(amp.scale_factor() == 16);
  CHECK(window(16, infinity) == std::pair(true, false));
  CHECK(amp.scale_factor() == 8);
  CHECK(window(8, 8) == std::pair(true, true));
  CHECK(amp.scale_factor() == 8);
  CHECK(amp.skipped() == 3);
}

TEST_CASE("AmpPolicy: gradients of several dtypes, sparse ones, or none at all") {
  AmpPolicy<Fp16> amp = fp16({.init_scale = 4});
  at::Tensor single = weight({1}), half = torch::ones({1}, torch::kHalf).requires_grad_(),
             wide = torch::ones({1}, torch::kDouble).requires_grad_(), unused = weight({1}),
             table = torch::ones({3, 1}).requires_grad_(), empty = torch::ones({0}).requires_grad_(),
             complex = torch::ones({1}, torch::kComplexFloat).requires_grad_();
  auto optimizer = sgd({single, half, wide, unused, empty, complex});
  auto of_table = sgd({table});
  const auto gradients = [&](double of_half) {
    amp.scale(torch::ones({}));
    for (auto& parameter : {single, half, wide, empty, complex})
      parameter.mutable_grad() = torch::full_like(parameter, 4);
    half.mutable_grad().fill_(of_half);
    amp.unscale(optimizer);
  };
  gradients(8);
  CHECK(single.grad().item<float>() == 1);
  CHECK(half.grad().item<float>() == 2);
  CHECK(wide.grad().item<double>() == 1);
  CHECK(complex.grad().item<c10::complex<float>>() == c10::complex<float>(1, 0));
  CHECK_FALSE(unused.grad().defined());
  {
    const Operators operators;
    CHECK(amp.step(optimizer));
    CHECK(operators.reads() == 1);  // whatever the number of dtypes
  }
  gradients(infinity);  // in one dtype only
  CHECK_FALSE(amp.step(optimizer));

  amp.scale(torch::ones({}));
  CHECK(amp.scale_factor() == 2);
  const auto rows = torch::tensor({1, 1}).unsqueeze(0);  // one row twice: the values must be summed first
  table.mutable_grad() = torch::sparse_coo_tensor(rows, torch::full({2, 1}, 4.0F), {3, 1});
  amp.unscale(of_table, 0.5);
  CHECK(table.grad().to_dense().equal(torch::tensor({0.0F, 2.0F, 0.0F}).unsqueeze(1)));
  CHECK(amp.step(of_table));
  table.mutable_grad() = torch::sparse_coo_tensor(rows, torch::full({2, 1}, 3e38F), {3, 1});  // the sum overflows
  CHECK_FALSE(amp.step(of_table));

  at::Tensor lonely = weight({1});
  auto without = sgd({lonely});
  const Operators operators;
  amp.unscale(without);
  CHECK(amp.step(without));  // no gradient: nothing overflowed
  CHECK(operators.reads() == 0);
}

TEST_CASE("AmpPolicy: gradients that wait to be conjugated or negated, with and without a scaler") {
  const at::Tensor conjugate = torch::full({2, 1}, c10::complex<float>(4, 8)).conj(), negative = at::imag(conjugate);
  const auto rows = torch::tensor({0, 1}).unsqueeze(0);
  const auto unscaled = [&](auto& amp, const at::Tensor& gradient) {
    amp.scale(torch::ones({}));
    at::Tensor w = torch::zeros({2, 1}, gradient.options().layout(at::kStrided)).requires_grad_();
    w.mutable_grad() = gradient;
    auto optimizer = sgd({w});
    amp.unscale(optimizer, 0.5);
    CHECK(amp.step(optimizer));
    return w.grad().to_dense().resolve_conj().resolve_neg();
  };
  const auto check = [&](auto amp, float divisor) {
    const at::Tensor complex = torch::full({2, 1}, c10::complex<float>(4 / divisor, -8 / divisor)),
                     real = torch::full({2, 1}, -8 / divisor);
    CHECK(unscaled(amp, conjugate).equal(complex));
    CHECK(unscaled(amp, negative).equal(real));
    CHECK(unscaled(amp, torch::sparse_coo_tensor(rows, conjugate, {2, 1})).equal(complex));
    CHECK(unscaled(amp, torch::sparse_coo_tensor(rows, negative, {2, 1})).equal(real));
  };
  check(fp16({.init_scale = 4}), 8);
  check(AmpPolicy<Fp32>(at::kCPU), 2);
}

TEST_CASE("AmpPolicy: a parameter that is listed twice, or in two groups, is unscaled once") {
  const auto check = [](auto amp, float expected) {
    at::Tensor w = weight({1}), other = weight({1});
    auto optimizer = sgd({w, w});
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({other}));
    optimizer.param_groups()[1].params().push_back(w);
    amp.scale(torch::ones({}));
    w.mutable_grad() = torch::full({1}, 16.0F);
    amp.unscale(optimizer, 0.5);
    CHECK(w.grad().item<float>() == expected);
  };
  check(fp16({.init_scale = 4}), 2);
  check(AmpPolicy<Fp32>(at::kCPU), 8);
}

TEST_CASE("AmpPolicy: a window that an exception ended between unscale and step is forgotten") {
  AmpPolicy<Fp16> amp = fp16();
  at::Tensor w = weight({1});
  auto optimizer = sgd({w});
  Throwing clip{true};
  const auto window = [&] {
    CHECK(frugal::backward((w * 2).sum(), 1, amp));
    return frugal::update(optimizer, amp, clip);
  };
  CHECK_THROWS_WITH(window(), "clip");
  clip.throws = false;
  CHECK(window() == frugal::StepResult::applied);
  CHECK(w.item<float>() == -1);
}

TEST_CASE("AmpPolicy: too many skips in a row are an error at the step that was one too many") {
  AmpPolicy<Fp16> amp = fp16({.max_consecutive_skips = 3});
  at::Tensor w = weight({1});
  auto optimizer = sgd({w});
  const auto overflow = [&] {
    amp.scale(torch::ones({}));
    w.mutable_grad() = torch::full({1}, infinity);
    return amp.step(optimizer);
  };
  CHECK_FALSE(overflow());
  CHECK_FALSE(overflow());
  CHECK_THROWS_WITH(overflow(), ContainsSubstring("step 3") && ContainsSubstring("learning rate"));
  CHECK(w.item<float>() == 1);
  CHECK(amp.skipped() == 3);
}

// --- in a loop ---------------------------------------------------------------------------------------------------

namespace {

// Ten steps of a small regression, accumulated over four micro-batches; the losses of all steps.
template <class Precision>
std::vector<double> train(Precision& amp, int steps = 10) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(8, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  const at::Tensor inputs = torch::randn({64, 8}), targets = inputs.sum(1, true).mul(0.3).sin();
  frugal::GradAccumulator accumulator(4);
  std::vector<double> losses;
  for (int i = 0; i < steps * 4; ++i) {
    const int at = (i % 4) * 16;
    const at::Tensor loss = [&] {
      auto guard = amp.autocast();
      return torch::mse_loss(model->forward(inputs.narrow(0, at, 16)), targets.narrow(0, at, 16));
    }();
    losses.push_back(loss.template item<double>());
    if (frugal::backward(loss, 16, amp, accumulator)) {
      CHECK(frugal::update(optimizer, amp, accumulator) == frugal::StepResult::applied);
    }
  }
  return losses;
}

}  // namespace

TEST_CASE("AmpPolicy: fp16 and bf16 train close to fp32") {
  AmpPolicy<Fp32> full(at::kCPU, able_cpu);
  AmpPolicy<Fp16> half = fp16({.init_scale = 1024});
  AmpPolicy<Bf16> bf(at::kCPU, able_cpu);
  const auto reference = train(full), in_half = train(half), in_bf = train(bf);
  REQUIRE(reference.back() < 0.5 * reference.front());
  double from_half = 0, from_bf = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    from_half = std::max(from_half, std::abs(in_half[i] - reference[i]));
    from_bf = std::max(from_bf, std::abs(in_bf[i] - reference[i]));
  }
  CHECK(from_half < 0.004);
  CHECK(from_bf < 0.02);
  CHECK(from_half > 0);  // it did compute in another precision
  CHECK(from_bf > 0);
}

TEST_CASE("AmpPolicy: one device read per window with a scaler, none without") {
  const auto reads = [](auto amp) {
    at::Tensor w = weight({1, 2});
    auto optimizer = sgd({w}, 0.01);
    frugal::GradAccumulator accumulator(2);
    const auto window = [&] {
      for (int i = 0; i < 2; ++i) {
        auto loss = [&] {
          auto guard = amp.autocast();
          return w.square().sum();
        }();
        if (frugal::backward(loss, 1, amp, accumulator)) frugal::update(optimizer, amp, accumulator);
      }
    };
    window();
    const Operators operators;
    window();
    return operators.reads();
  };
  CHECK(reads(fp16()) == 1);
  CHECK(reads(AmpPolicy<Bf16>(at::kCPU, able_cpu)) == 0);
  CHECK(reads(AmpPolicy<Fp32>(at::kCPU, able_cpu)) == 0);
}

namespace {

struct Group {
  std::vector<at::Tensor> tensors;
  std::vector<at::Tensor>& params() { return tensors; }
};
struct Own {
  std::vector<Group> groups;
  int steps = 0;
  std::vector<Group>& param_groups() { return groups; }
  void step() { ++steps; }
  void zero_grad() { groups[0].tensors[0].mutable_grad().reset(); }
};
struct StepTwice {
  static constexpr frugal::Role role = frugal::Role::update;
  void step(Own& optimizer) { optimizer.steps += 2; }
};

}  // namespace

TEST_CASE("AmpPolicy: works with any optimizer that shows its parameters, through a wrapper too") {
  StepTwice twice;
  AmpPolicy<Fp16> amp = fp16({.init_scale = 4});
  at::Tensor w = weight({1});
  Own optimizer{{Group{{w}}}};
  amp.scale(w.sum()).backward();
  CHECK(frugal::update(optimizer, amp, twice) == frugal::StepResult::applied);
  CHECK(optimizer.steps == 2);
  amp.scale((w * infinity).sum()).backward();
  CHECK(frugal::update(optimizer, amp, twice) == frugal::StepResult::skipped);
  CHECK(optimizer.steps == 2);
}

// --- state -------------------------------------------------------------------------------------------------------

TEST_CASE("AmpPolicy: a reloaded policy goes on exactly as the saved one") {
  const frugal::LossScalerOptions options{.init_scale = 64, .growth_interval = 2};
  AmpPolicy<Fp16> saved = fp16(options);
  at::Tensor w = weight({1});
  auto optimizer = sgd({w});
  const auto step = [&](auto& amp, double gradient) {
    amp.scale(torch::ones({}));
    w.mutable_grad() = torch::full({1}, gradient);
    amp.step(optimizer);
  };
  step(saved, infinity);
  step(saved, 1);
  const AmpPolicy<Fp16>& fixed = saved;
  TensorArchive archive;
  fixed.save(archive);
  CHECK(archive.get<std::string>("precision") == "fp16");
  CHECK(archive.get<double>("scale") == 32);
  AmpPolicy<Fp16> loaded = fp16(options);
  loaded.load(archive);
  CHECK(loaded.scale_factor() == 32);
  CHECK(loaded.skipped() == 1);
  for (auto* amp : {&saved, &loaded}) {
    step(*amp, 1);
    CHECK(amp->scale_factor() == 64);  // the second applied one in a row
  }

  Warnings warnings;
  AmpPolicy<Bf16> other(at::kCPU, able_cpu);
  other.load(archive);
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0], ContainsSubstring("in fp16") && ContainsSubstring("continues in bf16"));
  TensorArchive without_scaler;
  other.save(without_scaler);
  loaded.load(without_scaler);
  CHECK(warnings.texts.size() == 2);
  CHECK(loaded.scale_factor() == 64);

  w.mutable_grad() = torch::ones({1});
  loaded.unscale(optimizer);
  loaded.reset();  // the unfinished window too
  CHECK_NOTHROW(loaded.unscale(optimizer));
  CHECK(loaded.scale_factor() == 64);
  CHECK(loaded.skipped() == 0);
}

TEST_CASE("AmpPolicy: publishes scale and skips where it has a scaler") {
  frugal::Readings now;
  fp16({.init_scale = 512}).readings(now);
  CHECK(now.find("scale") == 512.0);
  CHECK(now.find("skipped") == 0.0);
  frugal::Readings none;
  AmpPolicy<Bf16>(at::kCPU, able_cpu).readings(none);
  AmpPolicy<>(at::kCPU, able_cpu, {.precision = Precision::bf16}).readings(none);
  CHECK(none.size() == 0);
}

// --- process-wide switches ---------------------------------------------------------------------------------------

namespace {

using at::Float32Backend, at::Float32Op, at::Float32Precision;

// Everything that TF32 and bit-exact touch, as its readers see it; -1: the reader throws.
std::vector<int> switches() {
  auto& c = at::globalContext();
  const auto read = [](auto reader) {
    try {
      return static_cast<int>(reader());
    } catch (const c10::Error&) { return -1; }
  };
  std::vector<int> all;
  for (const auto backend : {Float32Backend::CUDA, Float32Backend::MKLDNN})
    for (const auto op : {Float32Op::MATMUL, Float32Op::CONV, Float32Op::RNN})
      all.push_back(static_cast<int>(c.float32Precision(backend, op)));
  all.insert(all.end(),
             {read([&] { return c.allowTF32CuBLAS(); }), read([&] { return c.allowTF32CuDNN(); }),
              read([&] { return c.float32MatmulPrecision(); }), c.deterministicAlgorithms(),
              c.deterministicAlgorithmsWarnOnly(), c.deterministicCuDNN(), c.deterministicMkldnn(), c.benchmarkCuDNN(),
              c.deterministicFillUninitializedMemory(), c.allowFP16AccumulationCuBLAS(),
              c.allowFP16BF16ReductionMathSDP(), c.allowFP16ReductionCPU(),
              static_cast<int>(c.allowFP16ReductionCuBLAS()), static_cast<int>(c.allowBF16ReductionCuBLAS())});
  return all;
}

bool tf32_on() {
  auto& c = at::globalContext();
  return c.allowTF32CuBLAS() && c.allowTF32CuDNN() && c.allowTF32CuDNN(Float32Op::CONV);
}

}  // namespace

TEST_CASE("AmpPolicy: TF32 is on while a Tf32 policy lives, counted by owner and restored by the last one") {
  auto& context = at::globalContext();
  const auto untouched = switches();
  {
    const AmpPolicy<Tf32> cpu(at::kCPU, able_cpu);  // runs in fp32
    CHECK(switches() == untouched);
  }
  for (const char* users : {"highest", "high", "medium"})
    for (const bool convolutions : {true, false}) {
      context.setFloat32MatmulPrecision(users);
      context.setAllowTF32CuDNN(convolutions);
      const auto before = switches();
      {
        auto outer = std::make_unique<AmpPolicy<Tf32>>(at::kCUDA, gpu(8));
        CHECK(tf32_on());
        auto inner = std::make_unique<AmpPolicy<Auto>>(at::kCUDA, gpu(9), AmpOptions{.precision = Precision::tf32});
        AmpPolicy<Tf32> moved(std::move(*outer));
        outer.reset();
        CHECK(tf32_on());
        AmpPolicy<Auto> also_moved(std::move(*inner));
        inner.reset();
        CHECK(tf32_on());
      }
      CHECK(switches() == before);
    }
  context.setFloat32MatmulPrecision("highest");
  context.setAllowTF32CuDNN(true);
}

TEST_CASE("AmpPolicy: switches that the user set by LibTorch's newer interface come back as well") {
  auto& context = at::globalContext();
  context.setFloat32Precision(Float32Backend::CUDA, Float32Op::MATMUL,
                              Float32Precision::TF32);  // old readers throw now
  context.setFloat32Precision(Float32Backend::CUDA, Float32Op::CONV, Float32Precision::IEEE);
  const auto before = switches();
  {
    const AmpPolicy<Tf32> amp(at::kCUDA, gpu(8));
    CHECK(tf32_on());
  }
  CHECK(switches() == before);
  context.setFloat32MatmulPrecision("highest");
  context.setAllowTF32CuDNN(true);

  // A value inherited from the generic one still follows it afterwards.
  context.setFloat32Precision(Float32Backend::CUDA, Float32Op::MATMUL, Float32Precision::NONE);
  const auto inherited = [&] { return context.float32Precision(Float32Backend::CUDA, Float32Op::MATMUL); };
  REQUIRE(inherited() == Float32Precision::NONE);
  { const AmpPolicy<Tf32> amp(at::kCUDA, gpu(8)); }
  context.setFloat32Precision(Float32Backend::GENERIC, Float32Op::ALL, Float32Precision::TF32);
  CHECK(inherited() == Float32Precision::TF32);
  context.setFloat32Precision(Float32Backend::GENERIC, Float32Op::ALL, Float32Precision::NONE);
  context.setFloat32MatmulPrecision("highest");
}

TEST_CASE("AmpPolicy: bit-exact sets every switch that decides bits, and restores what the user had") {
  auto& context = at::globalContext();
  for (const bool users : {false, true}) {
    const auto original = switches();
    context.setBenchmarkCuDNN(users);
    context.setAllowTF32CuBLAS(users);
    context.setDeterministicFillUninitializedMemory(users);
    context.setDeterministicAlgorithms(users, users);
    context.setAllowFP16ReductionCuBLAS(users, true);
    context.setAllowBF16ReductionCuBLAS(false, users);
    const auto before = switches();
    {
      AmpPolicy<BitExact> amp(at::kCPU, able_cpu);
      CHECK(context.deterministicAlgorithms());
      CHECK_FALSE(context.deterministicAlgorithmsWarnOnly());
      CHECK(context.deterministicCuDNN());
      CHECK_FALSE(context.benchmarkCuDNN());
      CHECK(context.deterministicFillUninitializedMemory());
      CHECK_FALSE(context.allowTF32CuBLAS());
      CHECK_FALSE(context.allowTF32CuDNN());
      CHECK(context.allowFP16ReductionCuBLAS() != at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK);
      CHECK(context.allowBF16ReductionCuBLAS() != at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK);
      CHECK(product_dtype() == at::kFloat);
    }
    CHECK(switches() == before);
    context.setBenchmarkCuDNN(false);
    context.setAllowTF32CuBLAS(false);
    context.setDeterministicFillUninitializedMemory(true);
    context.setDeterministicAlgorithms(false, false);
    context.setAllowFP16ReductionCuBLAS(true, true);
    context.setAllowBF16ReductionCuBLAS(true, true);
  }
}

TEST_CASE("AmpPolicy: bit-exact and TF32 contradict each other") {
  const auto before = switches();
  auto exact = std::make_unique<AmpPolicy<BitExact>>(at::kCPU, able_cpu);
  CHECK_THROWS_WITH(AmpPolicy<Tf32>(at::kCUDA, gpu(8)), ContainsSubstring("contradict"));
  exact.reset();
  CHECK(switches() == before);
  auto tf32 = std::make_unique<AmpPolicy<Tf32>>(at::kCUDA, gpu(8));
  CHECK_THROWS_WITH(AmpPolicy<BitExact>(at::kCPU, able_cpu), ContainsSubstring("contradict"));
  CHECK(tf32_on());
  // Assignment hands the share over: this one's is given up, that one's is kept.
  *tf32 = AmpPolicy<Tf32>(at::kCUDA, gpu(9));
  CHECK(tf32_on());
  tf32.reset();
  CHECK(switches() == before);
}

TEST_CASE("AmpPolicy: bit-exact on a GPU needs the cuBLAS workspace in the environment") {
  ClearEnvironment clear;
  const auto before = switches();
  CHECK_THROWS_WITH(AmpPolicy<BitExact>(at::kCUDA, gpu(8)), ContainsSubstring("CUBLAS_WORKSPACE_CONFIG=:4096:8"));
  CHECK(switches() == before);
  for (const char* valid : {":4096:8", ":16:8"}) {
    const Environment workspace("CUBLAS_WORKSPACE_CONFIG", valid);
    CHECK_NOTHROW(AmpPolicy<BitExact>(at::kCUDA, gpu(8)));
  }
  CHECK(switches() == before);
}

TEST_CASE("AmpPolicy: two bit-exact runs give identical bits") {
  AmpPolicy<BitExact> amp(at::kCPU, able_cpu);
  CHECK(train(amp) == train(amp));
}
