#include "support/catch.hpp"
#include "support/states.hpp"

#include <frugal/detail/best_weights.hpp>
#include <frugal/detail/checkpoint_contents.hpp>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using namespace frugal;
using frugal::detail::restore_all;
using frugal::detail::restore_measured;
using frugal::detail::State;

namespace {

std::string error_of(auto&& call) {
  try {
    call();
  } catch (const c10::Error& error) { return error.what_without_backtrace(); } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

// A buffer of any kind, after a weight in the alphabet: what is restored before it would be restored by half.
struct OddImpl : torch::nn::Module {
  explicit OddImpl(at::Tensor buffer) {
    weight = register_parameter("a_weight", torch::ones({2}));
    odd = register_buffer("odd", std::move(buffer));
  }
  at::Tensor weight, odd;
};
TORCH_MODULE(Odd);

at::Tensor repeated(double value) { return torch::full({1, 3}, value).expand({4, 3}); }
at::Tensor windows(double first) { return torch::arange(5, torch::kFloat).add(first).unfold(0, 3, 1); }
at::Tensor of_inference(double value) {
  const c10::InferenceMode inference;
  return torch::full({3}, value);
}

// Brings a model into the state of another one, in the ways that there are.
struct Way {
  std::string name;
  void (*bring)(Odd& to, Odd& from);
};
const std::vector<Way> ways{
    {"restore",
     [](Odd& to, Odd& from) {
       torch::optim::SGD optimizer(to->parameters(), 0.1), other(from->parameters(), 0.1);
       restore_all(stored(from, other), to, optimizer);
     }},
    {"restore_best",
     [](Odd& to, Odd& from) { frugal::detail::restore_measured(frugal::detail::State(stored(from)), to); }},
    {"kept weights",
     [](Odd& to, Odd& from) {
       struct Nothing {
       } nothing;
       frugal::detail::KeptWeights<at::Tensor> kept;
       kept.keep(from, nothing);
       kept.keep(from, nothing);  // into the memory that it has
       kept.restore(to, nothing);
     }},
};

}  // namespace

TEST_CASE("buffers that are expanded, overlap or were made in inference mode are restored") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<std::pair<at::Tensor, at::Tensor>> pairs{
      {repeated(1), repeated(2)},
      {repeated(1), repeated(nan)},
      {torch::tensor(1.0).expand({3}), torch::tensor(2.0).expand({3})},
      {repeated(1).slice(0, 1, 2), repeated(5).slice(0, 1, 2)},
      {windows(0), windows(7)},
      {torch::zeros({4, 4}).slice(1, 0, 3), torch::ones({4, 4}).slice(1, 0, 3)},
      {torch::zeros({0, 3}).expand({0, 3}), torch::zeros({0, 3})},
      {of_inference(1), of_inference(2)},
  };
  for (std::size_t i = 0; i < pairs.size(); ++i)
    for (const Way& way : ways) {
      INFO(way.name << ", buffer " << i);
      // another way must not find the values of this one; a clone would not repeat or overlap
      const at::Tensor before = pairs[i].first.clone();
      Odd to(pairs[i].first), from(pairs[i].second);
      from->weight.detach().fill_(9);
      CHECK(error_of([&] { way.bring(to, from); }) == "no error");
      CHECK(same_bits(to->odd.clone(at::MemoryFormat::Contiguous), from->odd.clone(at::MemoryFormat::Contiguous)));
      CHECK(to->weight.eq(9).all().item<bool>());
      frugal::detail::write_values(to->odd, before);
    }
}

TEST_CASE("a tensor that cannot take its values is an error before anything is changed") {
  const at::Tensor rows = torch::arange(12, torch::kFloat).view({4, 3});
  const std::vector<std::pair<at::Tensor, at::Tensor>> pairs{
      {repeated(1), rows},
      {windows(0), rows.slice(0, 0, 3)},
      {torch::empty({4, 3}, torch::kMeta), rows},
      {at::_efficientzerotensor({4, 3}), rows},
      {rows.to_sparse(), rows},
  };
  for (std::size_t i = 0; i < pairs.size(); ++i)
    for (const Way& way : ways) {
      INFO(way.name << ", buffer " << i);
      Odd to(pairs[i].first), from(pairs[i].second.clone());
      from->weight.detach().fill_(9);
      CHECK_THAT(error_of([&] { way.bring(to, from); }), ContainsSubstring("cannot be restored, "));
      CHECK(to->weight.eq(1).all().item<bool>());
    }
}

TEST_CASE("kept weights may be sparse") {
  Odd model(torch::eye(3).to_sparse());
  struct Nothing {
  } nothing;
  frugal::detail::KeptWeights<at::Tensor> kept;
  kept.keep(model, nothing), kept.keep(model, nothing);
  model->odd.zero_();
  kept.restore(model, nothing);
  CHECK(model->odd.to_dense().equal(torch::eye(3)));
}

namespace {

// One tensor under two names, as an embedding and the layer that predicts from it.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    z_first = register_module("z_first", torch::nn::Linear(3, 3));
    second = register_module("second", torch::nn::Linear(3, 3));
    second->weight = z_first->weight;
    second->register_parameter("weight_too", z_first->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(z_first(x))); }
  torch::nn::Linear z_first{nullptr}, second{nullptr};
};
TORCH_MODULE(Tied);

void train(auto& net, torch::optim::Optimizer& optimizer, int steps) {
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    net(torch::ones({2, 3}).mul(i + 1)).pow(2).sum().backward();
    optimizer.step();
  }
  optimizer.zero_grad();
}

}  // namespace

TEST_CASE("tied weights: one state, listed under one name, whichever the optimizer lists first") {
  Tied net, other;
  const auto reversed = [](Tied& model) {
    auto all = model->parameters();
    std::ranges::reverse(all);
    return all;
  };
  REQUIRE(net->parameters().size() == 5);  // one of them twice
  torch::optim::Adam optimizer(net->parameters()), continued(reversed(other));
  train(net, optimizer, 3);
  train(other, continued, 1);
  const State saved = stored(net, optimizer);
  CHECK(saved.has("optimizer/model/z_first.weight/exp_avg") != saved.has("optimizer/model/second.weight_too/exp_avg"));
  restore_all(saved, other, continued);
  CHECK(difference(stored(other, continued), saved) == "");
  CHECK(continued.state().size() == 3);

  // and in two groups
  torch::optim::Adam grouped({torch::optim::OptimizerParamGroup(net->z_first->parameters()),
                              torch::optim::OptimizerParamGroup(net->second->parameters())}),
      grouped2({torch::optim::OptimizerParamGroup(other->z_first->parameters()),
                torch::optim::OptimizerParamGroup(other->second->parameters())});
  train(net, grouped, 2);
  restore_all(stored(net, grouped), other, grouped2);
  CHECK(difference(stored(other, grouped2), stored(net, grouped)) == "");
}

TEST_CASE("state in float32 of parameters in bfloat16 comes back as it was") {
  using torch::optim::AdamParamState;
  torch::nn::Linear net(3, 3), other(3, 3);
  net->to(torch::kBFloat16), other->to(torch::kBFloat16);
  torch::optim::Adam optimizer(net->parameters()), continued(other->parameters());
  for (const auto& parameter : net->parameters()) {
    auto state = std::make_unique<AdamParamState>();
    state->step(3);
    state->exp_avg(torch::rand(parameter.sizes())), state->exp_avg_sq(torch::rand(parameter.sizes()));
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
  const State saved = stored(net, optimizer);
  restore_all(saved, other, continued);
  CHECK(difference(stored(other, continued), saved) == "");
  State wider = saved;
  wider.tensors["optimizer/model/bias/exp_avg"] = torch::zeros({3}, torch::kLong);
  other->weight.detach().zero_();
  CHECK_THAT(error_of([&] { restore_all(wider, other, continued); }),
             ContainsSubstring("is Long [3] in the checkpoint, its parameter is BFloat16 [3]"));
  CHECK(other->weight.eq(0).all().item<bool>());
}

TEST_CASE("state whose type is not its parameter's comes back in the type that it has, and the run goes on the same") {
  const auto trained = [](torch::nn::Linear& net, torch::optim::Optimizer& optimizer, int steps) {
    for (int i = 0; i < steps; ++i) {
      for (auto& parameter : net->parameters()) parameter.mutable_grad() = parameter.detach() * 0.5 + 0.25;
      optimizer.step();
    }
  };
  using torch::kBFloat16, torch::kDouble, torch::kFloat, torch::kHalf;
  const std::vector<std::pair<at::ScalarType, at::ScalarType>> changes{
      {kFloat, kDouble}, {kFloat, kBFloat16}, {kBFloat16, kFloat}, {kHalf, kBFloat16}};
  for (const auto& [before, after] : changes) {
    torch::nn::Linear net(3, 3), other(3, 3);
    net->to(before), other->to(after);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD continued(other->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    trained(net, optimizer, 2);
    for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
    net->to(after);
    trained(net, optimizer, 1);
    const State saved = stored(net, optimizer);
    REQUIRE(saved.tensors.at("optimizer/model/bias/momentum_buffer").scalar_type() == before);
    restore_all(saved, other, continued);
    CHECK(difference(stored(other, continued), saved) == "");
    trained(net, optimizer, 2), trained(other, continued, 2);
    CHECK(net->weight.equal(other->weight));
  }
}

TEST_CASE("names that share memory: values that cannot both be there are refused before anything changes") {
  struct PairImpl : torch::nn::Module {
    enum class Second { own, tied, view, half, imaginary };
    explicit PairImpl(Second second) {
      p = register_parameter("p", torch::arange(6, torch::kFloat));
      switch (second) {
        case Second::own:
          q = register_parameter("q", torch::full({6}, 5.f));
          break;
        case Second::tied:
          q = register_parameter("q", p);
          break;
        case Second::view:
          q = register_buffer("q", p.detach().view({6}));
          break;
        case Second::half:
          q = register_buffer("q", p.detach().narrow(0, 3, 3));
          break;
        case Second::imaginary:
          q = register_buffer("q", torch::view_as_complex(p.detach().view({3, 2})).conj());
          break;
      }
    }
    at::Tensor p, q;
  };
  using Second = PairImpl::Second;
  const auto optimizer_of = [](const auto& model) { return torch::optim::SGD({model->p}, 0.1); };
  const auto own = std::make_shared<PairImpl>(Second::own);
  auto own_optimizer = optimizer_of(own);
  own->p.detach().fill_(7);
  State saved = stored(own, own_optimizer);
  for (const Second second : {Second::tied, Second::view}) {
    const auto model = std::make_shared<PairImpl>(second);
    auto optimizer = optimizer_of(model);
    const State before = stored(model, optimizer);
    CHECK_THAT(error_of([&] { restore_all(saved, model, optimizer); }),
               ContainsSubstring("'model/p' and 'model/q' share memory in this model") ||
                   ContainsSubstring("'model/q' and 'model/p' share memory in this model"));
    CHECK_THAT(error_of([&] { restore_measured(saved, model); }), ContainsSubstring("share memory"));
    CHECK(difference(stored(model, optimizer), before) == "");
  }
  saved.tensors.at("model/q").fill_(7);  // now they agree
  const auto tied = std::make_shared<PairImpl>(Second::tied);
  auto tied_optimizer = optimizer_of(tied);
  restore_all(saved, tied, tied_optimizer);
  CHECK(tied->p.eq(7).all().item<bool>());

  for (const Second second : {Second::tied, Second::view, Second::half, Second::imaginary}) {
    const auto model = std::make_shared<PairImpl>(second), fresh = std::make_shared<PairImpl>(second);
    auto optimizer = optimizer_of(model), fresh_optimizer = optimizer_of(fresh);
    model->p.detach().mul_(3);
    State written = stored(model, optimizer);
    restore_all(written, fresh, fresh_optimizer);
    CHECK(difference(stored(fresh, fresh_optimizer), written) == "");
    written.tensors.at("model/q").select(0, 1).fill_(100);
    CHECK_THAT(error_of([&] { restore_all(written, fresh, fresh_optimizer); }), ContainsSubstring("share memory"));
  }
}
