#include "support/catch.hpp"
#include "support/operators.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/averager.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/state_guard.hpp>
#include <frugal/update.hpp>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
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
  int made = 0;
  for (int i = 0; i < forwards; ++i) {
    const auto output = [&] {
      const Operators counted;
      const auto value = forward(amp, layer, cast_before);
      made += counted["aten::_to_copy"];
      return value;
    }();
    output.sum().backward();
  }
  return made;
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
  CHECK(registered("aten::addmm"));
  CHECK(warnings.texts.empty());
}

TEST_CASE("autocast kernels: they are gone with their last owner") {
  CHECK_FALSE(registered("aten::addmm"));
  {
    auto first = once_per_step();
    {
      const auto second = once_per_step();
      const auto moved = std::move(first);
      CHECK(registered("aten::addmm"));
    }
    CHECK_FALSE(registered("aten::addmm"));  // the second owner and the moved first one are gone
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

TEST_CASE("weight casts: an optimizer that is stepped past the policy is found out") {
  const bool drops = GENERATE(true, false);  // the gradients, or keeps them as zeros
  auto plain = linear(), kept = linear();
  torch::optim::SGD by_hand(plain->parameters(), 0.1), past(kept->parameters(), 0.1);  // it writes through .data()
  auto reference = stock();
  auto amp = once_per_step();
  for (int step = 0; step < 4; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      forward(reference, plain, input()).to(at::kFloat).square().mean().backward();
      forward(amp, kept, input()).to(at::kFloat).square().mean().backward();
    }
    by_hand.step(), past.step();
    by_hand.zero_grad(drops), past.zero_grad(drops);
    CHECK(torch::equal(plain->weight, kept->weight));
  }
  SECTION("and a weight that is written through .data() inside a region") {
    auto guard = amp.autocast();
    const auto before = kept->forward(input());
    kept->weight.data().mul_(2);
    CHECK_FALSE(torch::equal(before, kept->forward(input())));
  }
}

TEST_CASE("weight casts: none outlives the gradients of its window") {
  torch::nn::Linear layer(64, 64);
  const auto ones = torch::ones({2, 64});
  auto amp = once_per_step();
  const auto before = forward(amp, layer, ones);
  before.sum().backward();
  CHECK(torch::equal(before, forward(amp, layer, ones)));
  layer->weight.data().select(0, 0).select(0, 1).add_(8);  // one value among 4096
  layer->zero_grad();
  CHECK_FALSE(torch::equal(before, forward(amp, layer, ones)));
}

TEST_CASE("weight casts: a transposition is a cast one in a product alone, and where nobody watches it") {
  torch::manual_seed(9);
  torch::nn::Linear layer(torch::nn::LinearOptions(6, 4).bias(false));
  const auto& weight = layer->weight;
  auto amp = once_per_step();
  auto guard = amp.autocast();
  CHECK(weight.t().scalar_type() == at::kFloat);
  CHECK(torch::equal(weight.t().pow(2).sum(), weight.square().t().sum()));

  const auto casts_of = [&](auto&& product) {
    const auto low = input().to(at::kBFloat16);
    const Operators counted;
    product(low).sum().backward();
    return counted["aten::_to_copy"];
  };
  const auto by_layer = [&](const at::Tensor& low) { return layer->forward(low); };
  casts_of(by_layer);
  CHECK(casts_of(by_layer) == 0);  // matmul, and the node adds the gradient
  int seen = 0;
  const auto watched = [&](const at::Tensor& low) {
    const auto turned = weight.t();
    turned.register_hook([&](const at::Tensor&) { ++seen; });
    return at::mm(low, turned);
  };
  casts_of(watched);
  CHECK(seen == 1);
  const auto part = [&](const at::Tensor& low) { return at::mm(low, weight.narrow(0, 0, 2).t()); };
  CHECK(part(input().to(at::kBFloat16)).size(1) == 2);
}

namespace {
struct ScalesGradient : torch::autograd::Function<ScalesGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& weight, bool transposed) {
    return transposed ? weight.t() : weight.view_as(weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    static_cast<void>(context);
    const auto scaled = gradients[0] * 0.125;
    return {scaled.size(0) == 6 ? scaled.t() : scaled, at::Tensor()};
  }
};
}  // namespace

TEST_CASE("weight casts: what lies between a weight and its product is passed") {
  // from the weight, 4 x 6, to the factor, 6 x 4
  using Way = std::function<at::Tensor(const at::Tensor&, int& heard)>;
  const auto tells = [](at::Tensor tensor, int& heard) {
    tensor.register_hook([&heard](const at::Tensor& gradient) {
      ++heard;
      return gradient * 2;
    });
    return tensor;
  };
  const std::vector<Way> ways = {
      [](const at::Tensor& w, int&) { return w.t(); },
      [](const at::Tensor& w, int&) { return w.transpose(0, 1); },
      [](const at::Tensor& w, int&) { return w.mT(); },
      [](const at::Tensor& w, int&) { return w.t().t().t(); },
      [](const at::Tensor& w, int&) { return ScalesGradient::apply(w, false).t(); },
      [](const at::Tensor& w, int&) { return ScalesGradient::apply(w, true); },
      [&](const at::Tensor& w, int& heard) { return tells(w.view_as(w), heard).t(); },
      [&](const at::Tensor& w, int& heard) { return tells(w.t(), heard); },
      [](const at::Tensor& w, int&) { return at::_neg_view(w).t(); },
      [](const at::Tensor& w, int&) {
        auto view = w.t();
        view.set_data(torch::ones({4, 6}).t());
        return view;
      },
  };
  for (std::size_t i = 0; i < ways.size(); ++i) {
    INFO("way " << i);
    const auto run = [&](AmpPolicy<Bf16> amp) {
      const auto layer = linear();
      const auto& weight = layer->weight;
      int heard = 0;
      const auto output = [&] {
        auto guard = amp.autocast();
        return torch::matmul(input(), ways[i](weight, heard));
      }();
      output.sum().backward();
      return std::tuple(output, weight.grad(), heard);
    };
    const auto [output, gradient, heard] = run(once_per_step());
    const auto [expected, expected_gradient, expected_heard] = run(stock());
    CHECK(torch::equal(output, expected));
    CHECK(torch::equal(gradient, expected_gradient));
    CHECK(heard == expected_heard);
  }
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

TEST_CASE("weight casts: their memory ends with their model") {
  auto amp = once_per_step();
  auto stays = linear();
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> gone;
  const auto kept = [&] { return std::ranges::count_if(gone, [](const auto& weight) { return !weight.expired(); }); };
  for (int i = 0; i < 4; ++i) {  // stepped by hand, past the policy
    auto layer = linear();
    torch::optim::SGD optimizer(layer->parameters(), 0.5);
    forward(amp, stays, input()).sum().backward();
    forward(amp, layer, input()).sum().backward();
    optimizer.step();
    gone.emplace_back(layer->weight.getIntrusivePtr());
  }
  CHECK(kept() == 1);
  const auto owners = stays->weight.use_count();
  forward(amp, stays, input());
  CHECK(kept() == 0);
  CHECK(stays->weight.use_count() == owners);  // its cast is still there
}

// detail/cast_node.hpp: the cast's node adds the gradient itself, where nobody could tell.

namespace {

using frugal::detail::recorded_cast;
using torch::autograd::variable_list;

// Where a test may put things between a weight's cast and its gradient.
struct Cast {
  at::Tensor weight, cast;
  void total(at::Tensor gradient) const { weight.mutable_grad() = std::move(gradient); }
  torch::autograd::Node& accumulator() const { return *torch::autograd::impl::grad_accumulator(weight); }
  // A pass that sends `gradient` through the cast.
  void pass(const at::Tensor& gradient) const { cast.backward(gradient, /*retain_graph=*/true); }
};

at::Tensor numbers(at::IntArrayRef sizes = {4, 6}) { return torch::randn(sizes); }
at::Tensor low(at::IntArrayRef sizes = {4, 6}) { return torch::randn(sizes).to(at::kBFloat16); }

struct Seen {
  std::vector<at::Tensor> tensors;
  std::int64_t version = -1;  // of the weight's gradient, -1: it has none
  bool recorded = false, threw = false;
  int additions = 0;
};
// What comes of use(cast) with our cast of a weight, or with LibTorch's: the tensors it returns, and the weight's gradient.
Seen seen(const std::function<variable_list(const Cast&)>& use, bool ours) {
  torch::manual_seed(3);
  const auto weight = numbers().requires_grad_();
  const Cast cast{weight, ours ? recorded_cast(weight, at::kBFloat16) : weight.to(at::kBFloat16)};
  REQUIRE((cast.cast.grad_fn()->name() == "ToCopyBackward0") != ours);
  cast.total(numbers());
  Seen all;
  Warnings unheard;
  const Operators counted;
  try {
    all.tensors = use(cast);
  } catch (const std::exception&) { all.threw = true; }
  all.additions = counted["aten::add_"];
  if (!weight.is_leaf() || !weight.grad().defined()) return all;
  all.version = weight.grad().is_inference() ? -1 : weight.grad()._version();
  all.recorded = weight.grad().requires_grad();
  all.tensors.push_back(weight.grad().is_sparse() ? weight.grad().to_dense() : weight.grad().detach());
  weight.mutable_grad().reset();  // with create_graph it holds the weight
  return all;
}
enum class By { node, libtorch };  // who adds what comes through our cast
// Nobody can tell the two casts apart.
void same(By by, const std::function<variable_list(const Cast&)>& use) {
  const Seen ours = seen(use, true), theirs = seen(use, false);
  CHECK(ours.threw == theirs.threw);
  CHECK(ours.version == theirs.version);
  CHECK(ours.recorded == theirs.recorded);
  if (by == By::node) CHECK(ours.additions < theirs.additions);
  else CHECK(ours.additions == theirs.additions);
  REQUIRE(ours.tensors.size() == theirs.tensors.size());
  for (std::size_t i = 0; i < ours.tensors.size(); ++i) {
    const at::Tensor &one = ours.tensors[i], &other = theirs.tensors[i];
    REQUIRE(one.defined() == other.defined());
    if (one.defined())
      CHECK((one.scalar_type() == other.scalar_type() && one.strides() == other.strides() &&
             torch::allclose(one, other, 0, 0, /*equal_nan=*/true)));
  }
}

struct Doubles : torch::autograd::FunctionPreHook {
  variable_list operator()(const variable_list& gradients) override { return {gradients[0] * 2}; }
};
struct Widens : torch::autograd::FunctionPreHook {
  variable_list operator()(const variable_list& gradients) override { return {gradients[0].to(at::kDouble)}; }
};
struct Notes : torch::autograd::FunctionPostHook {
  explicit Notes(variable_list& list) : to(list) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    for (const auto* list : {&outputs, &inputs})
      for (const at::Tensor& tensor : *list) to.push_back(tensor);
    return outputs;
  }
  variable_list& to;
};
struct NotesTotal : torch::autograd::PostAccumulateGradHook {
  explicit NotesTotal(variable_list& list) : to(list) {}
  void operator()(const at::Tensor& weight) override { to.push_back(weight.grad().clone()); }
  variable_list& to;
};

}  // namespace

TEST_CASE("cast node: every number of 16 bits is added as LibTorch adds it, whatever the length") {
  const auto all_bits = torch::arange(-32768, 32768).to(at::kShort);
  for (const auto dtype : {at::kBFloat16, at::kHalf})
    for (const std::int64_t count : {1, 3, 15, 16, 17, 65535, 65536, 300007}) {
      const auto bits = all_bits.repeat(6).slice(0, 31000, 31000 + count);
      const auto gradient = bits.view(dtype).clone(), total = torch::randn(count);
      const auto weight = torch::zeros(count).requires_grad_();
      weight.mutable_grad() = total.clone();
      const Operators counted;
      recorded_cast(weight, dtype).backward(gradient);
      CHECK(counted["aten::add_"] == 0);
      CHECK(torch::allclose(weight.grad(), total + gradient.to(at::kFloat), 0, 0, /*equal_nan=*/true));
    }
}

TEST_CASE("cast node: from the second micro-batch on no operator casts or adds, and the bits are the same") {
  const auto alike = [](auto layer, const at::Tensor& example) {
    const auto gradients = [&](AmpPolicy<Bf16> amp) {
      variable_list all;
      const int weights = static_cast<int>(layer->parameters().size());
      for (int i = 0; i < 4; ++i) {
        const auto output = forward(amp, layer, example * (i + 1));
        const Operators counted;
        output.backward(output.detach());
        const bool steady = i > 0, fused = amp.extras() && steady;
        CHECK(counted["aten::_to_copy"] == (fused ? 0 : weights));
        CHECK(counted["aten::add_"] == (fused || !steady ? 0 : weights));
        for (const auto& weight : layer->parameters()) all.push_back(weight.grad().clone());
      }
      layer->zero_grad();
      return all;
    };
    const auto ours = gradients(once_per_step()), theirs = gradients(stock());
    for (std::size_t i = 0; i < ours.size(); ++i) CHECK(ours[i].equal(theirs[i]));
  };
  alike(torch::nn::Linear(300, 310), torch::randn({8, 300}));
  alike(torch::nn::Linear(torch::nn::LinearOptions(6, 4).bias(false)), torch::randn({2, 5, 6}));
  alike(torch::nn::Conv1d(torch::nn::Conv1dOptions(3, 4, 3)), torch::randn({2, 3, 8}));
  alike(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(1)), torch::randn({2, 3, 8, 8}));
  alike(torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(3, 4, 3)), torch::randn({2, 3, 8, 8}));
}

TEST_CASE("cast node: the weight's gradient is added to in place, whoever holds it") {
  same(By::node, [](const Cast& at) -> variable_list {
    const auto held = at.weight.grad();
    at.pass(low()), at.pass(low());
    return {held};
  });
  same(By::node, [](const Cast& at) -> variable_list {  // a view, and what it is a view of
    const auto flat = numbers({50});
    at.total(flat.narrow(0, 1, 24).view({4, 6}));
    at.pass(low());
    return {flat};
  });
  same(By::node, [](const Cast& at) -> variable_list {  // memory that is copied when it is written
    const auto shared = numbers();
    at.total(torch::_lazy_clone(shared));
    at.pass(low());
    return {shared};
  });
  same(By::node, [](const Cast& at) -> variable_list {
    at.total(numbers().requires_grad_());
    at.pass(low());
    return {};
  });
  same(By::node, [](const Cast& at) -> variable_list {  // the cast used twice: LibTorch sums in bf16
    const auto a = low(), b = low();
    (at.cast * a + at.cast * b).sum().backward();
    return {};
  });
}

TEST_CASE("cast node: a gradient that is missing, replaced or of another kind") {
  const auto with = [](By by, const std::function<at::Tensor()>& total, const std::function<at::Tensor()>& gradient) {
    same(by, [&](const Cast& at) -> variable_list {
      at.total(total());
      at.pass(gradient());
      return {};
    });
  };
  const auto any = [] { return low(); };
  const auto usual = [] { return numbers(); };
  same(By::node, [](const Cast& at) -> variable_list {
    at.total({});
    at.pass(low()), at.pass(low());
    at.total(numbers());
    at.pass(low());
    at.weight.mutable_grad().reset();
    at.pass(low());
    return {};
  });
  with(By::libtorch, [] { return numbers().to(at::kDouble); }, any);
  with(By::libtorch, [] { return numbers().to_sparse(); }, any);
  with(By::libtorch, [] { return numbers({6, 4}).t(); }, any);
  with(By::libtorch, [] { return numbers({1, 6}); }, any);
  with(
      By::libtorch, [] { return numbers({4, 12}).slice(1, 0, 12, 2); }, [] { return low({4, 12}).slice(1, 0, 12, 2); });
  with(By::libtorch, [] { return numbers({1}).expand({4, 6}); }, [] { return low({1}).expand({4, 6}); });
  with(By::libtorch, usual, [] { return low({6, 4}).t(); });
  with(By::libtorch, usual, [] { return torch::_neg_view(low()); });
  with(By::libtorch, [] { return torch::_neg_view(numbers()); }, any);
  with(
      By::libtorch,
      [] {
        const c10::InferenceMode mode;
        return numbers();
      },
      any);
}

TEST_CASE("cast node: passes that do not accumulate, or are recorded") {
  same(By::libtorch,
       [](const Cast& at) -> variable_list { return torch::autograd::grad({at.cast}, {at.weight}, {low()}); });
  same(By::libtorch, [](const Cast& at) -> variable_list {
    at.cast.square().sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    return torch::autograd::grad({at.weight.grad().square().sum()}, {at.weight});
  });
  same(By::libtorch, [](const Cast& at) -> variable_list {
    at.cast.backward(low(), /*retain_graph=*/false, /*create_graph=*/false, at::TensorList({at.weight}));
    return {};
  });
  same(By::libtorch, [](const Cast& at) -> variable_list {  // outside of a pass
    const torch::NoGradGuard off;
    return (*at.cast.grad_fn())({low()});
  });
  same(By::libtorch, [](const Cast& at) -> variable_list { return (*at.cast.grad_fn())({at::Tensor()}); });
  same(By::libtorch, [](const Cast& at) -> variable_list {
    const torch::autograd::DetectAnomalyGuard anomaly;
    at.pass(torch::full({4, 6}, std::numeric_limits<float>::quiet_NaN()).to(at::kBFloat16));
    return {};
  });
  same(By::libtorch, [](const Cast& at) -> variable_list {
    const c10::InferenceMode mode;
    at.pass(low());
    return {};
  });
  same(By::libtorch, [](const Cast& at) -> variable_list {
    const auto level = torch::autograd::forward_ad::enter_dual_level();
    at.pass(torch::_make_dual(low(), low(), static_cast<std::int64_t>(level)));
    const auto tangent = at.weight.grad()._fw_grad(level).clone();
    torch::autograd::forward_ad::exit_dual_level(level);
    return {tangent};
  });
}

TEST_CASE("cast node: hooks see and change what they would") {
  same(By::libtorch, [](const Cast& at) -> variable_list {
    at.weight.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    at.pass(low());
    return {};
  });
  same(By::libtorch, [](const Cast& at) -> variable_list {
    at.accumulator().add_pre_hook(std::make_unique<Doubles>());
    at.pass(low());
    return {};
  });
  same(By::libtorch, [](const Cast& at) -> variable_list {
    variable_list noted;
    at.accumulator().add_post_hook(std::make_unique<Notes>(noted));
    at.pass(low());
    return noted;
  });
  same(By::libtorch, [](const Cast& at) -> variable_list {
    variable_list noted;
    torch::autograd::impl::set_post_acc_grad_hooks(at.weight, std::make_unique<NotesTotal>(noted));
    at.pass(low());
    return noted;
  });
  same(By::libtorch, [](const Cast& at) -> variable_list {
    variable_list noted;
    at.cast.grad_fn()->add_post_hook(std::make_unique<Notes>(noted));
    at.pass(low());
    return noted;
  });
  same(By::libtorch, [](const Cast& at) -> variable_list {
    at.cast.grad_fn()->add_pre_hook(std::make_unique<Widens>());
    at.pass(low());
    return {};
  });
  same(By::node, [](const Cast& at) -> variable_list {
    at.cast.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    at.pass(low());
    return {};
  });
}

TEST_CASE("cast node: a weight that is also used elsewhere, frozen, or no leaf any more") {
  const auto apart = [](const Cast& at) -> variable_list {
    at.total(numbers() * 1e3);
    ((at.cast * low()).sum().to(at::kFloat) + (at.weight * numbers()).sum()).backward();
    return {};
  };
  for (int i = 0; i < 4; ++i) same(By::libtorch, apart);
  same(By::libtorch, [](const Cast& at) -> variable_list {
    at.weight.requires_grad_(false);
    at.pass(low());
    return {};
  });
  same(By::libtorch, [](const Cast& at) -> variable_list {
    at.weight.requires_grad_(false);
    at.weight.mul_(numbers().requires_grad_());
    CHECK_THROWS(at.pass(low()));
    return {at.weight.mutable_grad()};
  });
  same(By::node, [](const Cast& at) -> variable_list {
    at.weight.requires_grad_(false).requires_grad_();
    at.pass(low());
    return {};
  });
}

TEST_CASE("cast node: passes of several threads, with each other and with LibTorch's") {
  const auto weight = torch::zeros(20000).requires_grad_(), ones = torch::ones(20000);
  const auto cast = recorded_cast(weight, at::kBFloat16), low_ones = ones.to(at::kBFloat16);
  weight.mutable_grad() = torch::zeros(20000);
  constexpr int passes = 4000;
  const auto through_cast = [&] {
    for (int i = 0; i < passes; ++i) cast.backward(low_ones, /*retain_graph=*/true);
  };
  const auto past_it = [&] {
    for (int i = 0; i < passes; ++i) (weight * ones).sum().backward();
  };
  const auto at_once = [](const auto& one, const auto& other) {
    std::thread beside(one);
    other();
    beside.join();
  };
  at_once(through_cast, through_cast);
  CHECK(weight.grad().equal(ones * 2 * passes));
  at_once(through_cast, past_it);
  CHECK(weight.grad().equal(ones * 4 * passes));
}

TEST_CASE("cast node: only for plain weights in 16 bits, and outlived by the weight") {
  const auto weight = numbers().requires_grad_();
  CHECK(recorded_cast(weight, at::kFloat).is_same(weight));
  CHECK(recorded_cast(weight, at::kDouble).grad_fn()->name() == "ToCopyBackward0");
  const auto sparse = numbers().to_sparse().requires_grad_();
  CHECK(recorded_cast(sparse, at::kBFloat16).grad_fn()->name() == "ToCopyBackward0");
  const auto level = torch::autograd::forward_ad::enter_dual_level();
  weight._set_fw_grad(numbers(), level, /*is_inplace_op=*/false);
  CHECK(recorded_cast(weight, at::kBFloat16)._fw_grad(level).defined());
  torch::autograd::forward_ad::exit_dual_level(level);

  const auto owners = weight.use_count();
  {
    const auto cast = recorded_cast(weight, at::kBFloat16);
    CHECK(cast.requires_grad());
    CHECK_FALSE(cast.is_leaf());
    cast.backward(low()), cast.backward(low());
  }
  CHECK(weight.use_count() == owners);
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
  CHECK_FALSE(registered("aten::addmm"));
  CHECK_FALSE(registered("aten::scaled_dot_product_attention"));
}

TEST_CASE("weight casts: what a sample of the weight misses, its version, its memory or a notice tells") {
  torch::nn::Linear layer(64, 64);
  const auto ones = torch::ones({2, 64});
  auto amp = once_per_step();
  const auto before = forward(amp, layer, ones);
  before.sum().backward();  // a window is open
  REQUIRE(torch::equal(before, forward(amp, layer, ones)));
  const auto change_one = [](const at::Tensor& weight) { weight.select(0, 0).select(0, 1).add_(8); };
  SECTION("its version") {
    const torch::NoGradGuard guard;
    change_one(layer->weight);
  }
  SECTION("its memory") {
    const auto other = layer->weight.detach().clone();
    change_one(other);
    layer->weight.set_data(other);
  }
  SECTION("a notice") {
    change_one(layer->weight.data());
    REQUIRE(torch::equal(before, forward(amp, layer, ones)));
    frugal::detail::forget_casts();
  }
  CHECK_FALSE(torch::equal(before, forward(amp, layer, ones)));
}

TEST_CASE("weight casts: none is kept without gradient recording, and each is of the dtype in force") {
  auto layer = linear();
  auto amp = once_per_step();
  const auto owners = layer->bias.use_count();
  {
    const torch::NoGradGuard guard;
    forward(amp, layer, input());
  }
  CHECK(layer->bias.use_count() == owners);
  auto guard = amp.autocast();
  CHECK(layer->forward(input()).scalar_type() == at::kBFloat16);
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  CHECK(layer->forward(input()).scalar_type() == at::kHalf);
}
