#include "support/catch.hpp"
#include "support/states.hpp"

#include <frugal/detail/checkpoint_contents.hpp>

#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using frugal::Progress;
using frugal::detail::restore_all;
using frugal::detail::State;

// The state of LibTorch's optimizers on its way through a checkpoint, in memory.

namespace {

namespace optim = torch::optim;
using Groups = std::vector<optim::OptimizerParamGroup>;
using Make = std::function<std::unique_ptr<optim::Optimizer>(Groups)>;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)));
    fc = register_module("fc", torch::nn::Linear(4, 2));
    conv->weight.set_data(conv->weight.data().contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(const at::Tensor& x) { return fc(torch::tanh(conv(x)).mean({2, 3})); }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Net);

// Weights and biases in two groups, as trainings often have them.
Groups groups_of(Net& net) {
  return {optim::OptimizerParamGroup({net->conv->weight, net->fc->weight}),
          optim::OptimizerParamGroup({net->conv->bias, net->fc->bias})};
}

void train(Net& net, optim::Optimizer& optimizer, int steps) {
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    const at::Tensor x = torch::arange(2 * 3 * 5 * 5, torch::kFloat).view({2, 3, 5, 5}).mul(0.01).add(i * 0.1);
    net(x).pow(2).sum().backward();
    optimizer.step();
  }
  optimizer.zero_grad();
}

template <class Options>
Options& options(optim::Optimizer& optimizer, std::size_t group) {
  return static_cast<Options&>(optimizer.param_groups()[group].options());
}

struct Case {
  std::string name;
  Make trained;  // as the run that is interrupted makes it
  Make fresh;    // as the one that continues: other options, which the checkpoint replaces
  std::function<void(optim::Optimizer&)> set;  // options that are changed after construction
};

template <class Optimizer, class Options>
Make maker(Options options) {
  return [options](Groups groups) { return std::make_unique<Optimizer>(std::move(groups), options); };
}

std::vector<Case> cases() {
  using namespace optim;
  return {
      {"AdamW", maker<AdamW>(AdamWOptions(0.01)), maker<AdamW>(AdamWOptions(0.5)),
       [](Optimizer& o) {
         options<AdamWOptions>(o, 0).lr(0.02).betas({0.8, 0.95}).eps(1e-7);
         options<AdamWOptions>(o, 1).weight_decay(0);
       }},
      {"AdamW amsgrad in one group", maker<AdamW>(AdamWOptions(0.01)), maker<AdamW>(AdamWOptions(0.5)),
       [](Optimizer& o) { options<AdamWOptions>(o, 0).amsgrad(true); }},
      {"Adam amsgrad", maker<Adam>(AdamOptions(0.01).amsgrad(true)), maker<Adam>(AdamOptions(0.5)),
       [](Optimizer& o) { options<AdamOptions>(o, 1).lr(0.003).weight_decay(0.1); }},
      {"SGD", maker<SGD>(SGDOptions(0.01)), maker<SGD>(SGDOptions(0.5).momentum(0.3)), [](Optimizer&) {}},
      {"SGD momentum in one group", maker<SGD>(SGDOptions(0.01)), maker<SGD>(SGDOptions(0.5)),
       [](Optimizer& o) { options<SGDOptions>(o, 0).momentum(0.9).nesterov(true).weight_decay(0.01); }},
      {"SGD dampening", maker<SGD>(SGDOptions(0.01).momentum(0.9).dampening(0.2)), maker<SGD>(SGDOptions(0.5)),
       [](Optimizer& o) { options<SGDOptions>(o, 1).lr(0.02); }},
      {"Adagrad", maker<Adagrad>(AdagradOptions(0.1).initial_accumulator_value(0.3)),
       maker<Adagrad>(AdagradOptions(0.5)),
       [](Optimizer& o) { options<AdagradOptions>(o, 0).lr_decay(0.1).weight_decay(0.01).eps(1e-8); }},
      {"RMSprop", maker<RMSprop>(RMSpropOptions(0.01)), maker<RMSprop>(RMSpropOptions(0.5)), [](Optimizer&) {}},
      {"RMSprop centered with momentum", maker<RMSprop>(RMSpropOptions(0.01).momentum(0.9).centered(true)),
       maker<RMSprop>(RMSpropOptions(0.5)),
       [](Optimizer& o) { options<RMSpropOptions>(o, 1).alpha(0.9).eps(1e-6).weight_decay(0.01); }},
  };
}

}  // namespace

TEST_CASE("every optimizer continues bit for bit, options that were changed later included") {
  for (const Case& one : cases()) {
    INFO(one.name);
    Net net;
    const auto optimizer = one.trained(groups_of(net));
    one.set(*optimizer);
    train(net, *optimizer, 2);
    optimizer->param_groups()[1].options().set_lr(0.004);
    train(net, *optimizer, 2);
    const State saved = stored(net, *optimizer);

    Net other;
    const auto continued = one.fresh(groups_of(other));
    train(other, *continued, 3);  // state that has to go
    restore_all(saved, other, *continued);
    CHECK(difference(stored(other, *continued), saved) == "");

    train(net, *optimizer, 3);
    train(other, *continued, 3);
    CHECK(difference(stored(other, *continued), stored(net, *optimizer)) == "");
  }
}

TEST_CASE("an optimizer that has not stepped yet is restored to having no state") {
  Net net, other;
  optim::AdamW optimizer(groups_of(net), optim::AdamWOptions(0.01)),
      continued(groups_of(other), optim::AdamWOptions(0.01));
  const State saved = stored(net, optimizer);
  train(other, continued, 2);
  restore_all(saved, other, continued);
  CHECK(continued.state().empty());
  CHECK(difference(stored(other, continued), saved) == "");
}

TEST_CASE("state has the strides of its parameter, and stays where others refer to it") {
  Net net, other;
  optim::Adam optimizer(groups_of(net), optim::AdamOptions(0.01)),
      continued(groups_of(other), optim::AdamOptions(0.01));
  train(net, optimizer, 1);
  train(other, continued, 1);
  void* const key = other->conv->weight.unsafeGetTensorImpl();
  const auto* const before = continued.state().at(key).get();
  const auto* const options_before = &continued.param_groups()[0].options();
  restore_all(stored(net, optimizer), other, continued);

  CHECK(continued.state().at(key).get() == before);
  CHECK(&continued.param_groups()[0].options() == options_before);
  const auto& state = static_cast<const optim::AdamParamState&>(*continued.state().at(key));
  CHECK_FALSE(state.exp_avg().is_contiguous());
  CHECK(state.exp_avg().strides() == other->conv->weight.strides());
  CHECK_FALSE(state.exp_avg().requires_grad());
}

TEST_CASE("an optimizer of another class, or with other groups, is an error that changes nothing") {
  Net net;
  optim::AdamW optimizer(groups_of(net), optim::AdamWOptions(0.01));
  train(net, optimizer, 2);
  const State saved = stored(net, optimizer);

  Net other;
  const auto refused = [&](optim::Optimizer& different, const State& from, const std::string& why) {
    train(other, different, 1);
    const State before = stored(other, different);
    try {
      restore_all(from, other, different);
      FAIL_CHECK("it was accepted: " << why);
    } catch (const c10::Error& error) { CHECK_THAT(error.what_without_backtrace(), ContainsSubstring(why)); }
    CHECK(difference(stored(other, different), before) == "");
  };
  optim::Adam adam(groups_of(other), optim::AdamOptions(0.01));
  refused(adam, saved, "'optimizer' is AdamW in the checkpoint and Adam here");
  optim::AdamW one_group(other->parameters(), optim::AdamWOptions(0.01));
  refused(one_group, saved, "2 parameter groups in the checkpoint and 1 here");
  optim::AdamW fewer({optim::OptimizerParamGroup({other->conv->weight, other->fc->weight}),
                      optim::OptimizerParamGroup({other->conv->bias})},
                     optim::AdamWOptions(0.01));
  refused(fewer, saved, "2 parameters in group 1 of the checkpoint and 1 here");
  optim::AdamW moved({optim::OptimizerParamGroup({other->conv->weight, other->fc->bias}),
                      optim::OptimizerParamGroup({other->conv->bias, other->fc->weight})},
                     optim::AdamWOptions(0.01));
  refused(moved, saved, "'model/fc.bias' is not in group 0");

  optim::AdamW same(groups_of(other), optim::AdamWOptions(0.01));
  State changed = saved;
  changed.values.erase("optimizer/group.1/eps");
  refused(same, changed, "no 'optimizer/group.1/eps'");
  changed = saved;
  changed.values["optimizer/group.1/fused"] = "int:1";
  refused(same, changed, "no place for 'optimizer/group.1/fused'");
  changed = saved;
  changed.tensors["optimizer/model/fc.bias/exp_avg"] = torch::zeros({3});
  refused(same, changed, "'model/fc.bias/exp_avg' is Float [3] in the checkpoint");
  changed = saved;
  changed.tensors["optimizer/model/fc.bias/exp_avg"] = torch::zeros({2}, torch::kComplexFloat);
  refused(same, changed, "'model/fc.bias/exp_avg' is ComplexFloat [2] in the checkpoint");
  changed = saved;
  changed.values["optimizer/group.0/lr"] = "int:1";
  refused(same, changed, "another type");
}

TEST_CASE("parameters are found by name: their order does not matter") {
  Net net, other;
  optim::SGD optimizer({net->fc->bias, net->fc->weight}, optim::SGDOptions(0.01).momentum(0.9));
  train(net, optimizer, 2);
  optim::SGD continued({other->fc->weight, other->fc->bias}, optim::SGDOptions(0.01).momentum(0.9));
  restore_all(stored(net, optimizer), other, continued);
  train(net, optimizer, 2);
  train(other, continued, 2);
  CHECK(difference(stored(other, continued), stored(net, optimizer)) == "");
}

TEST_CASE("a parameter that is in no module goes by its place, with its value") {
  Net net, other;
  const auto scale = torch::ones({2}, torch::requires_grad()), other_scale = torch::zeros({2}, torch::requires_grad());
  const auto step = [](Net& model, const at::Tensor& factor, optim::Optimizer& optimizer) {
    optimizer.zero_grad();
    model(torch::ones({1, 3, 5, 5})).mul(factor).pow(2).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  optim::Adam optimizer({optim::OptimizerParamGroup(net->parameters()), optim::OptimizerParamGroup({scale})}),
      continued({optim::OptimizerParamGroup(other->parameters()), optim::OptimizerParamGroup({other_scale})});
  step(net, scale, optimizer);
  const State saved = stored(net, optimizer);
  CHECK(saved.has("parameter/optimizer.group.1.0"));
  CHECK(saved.has("optimizer/optimizer.group.1.0/exp_avg"));
  restore_all(saved, other, continued);
  step(net, scale, optimizer);
  step(other, other_scale, continued);
  CHECK(torch::equal(scale, other_scale));
  CHECK(difference(stored(other, continued), stored(net, optimizer)) == "");
}

namespace {

// An optimizer of a user, with a class of options that nobody knows.
struct SignOptions : optim::OptimizerCloneableOptions<SignOptions> {};
struct Sign : optim::Optimizer {
  explicit Sign(std::vector<at::Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<SignOptions>()) {}
  at::Tensor step(LossClosure = nullptr) override { return {}; }
};
// LibTorch's options, a state of its own.
struct OwnState : optim::OptimizerCloneableParamState<OwnState> {};

}  // namespace

TEST_CASE("an optimizer whose state is not known is an error, not a checkpoint without it") {
  Net net;
  Sign sign(net->parameters());
  CHECK_THROWS_AS(stored(net, sign), c10::Error);
  optim::SGD own(net->parameters(), 0.1);
  own.state()[net->fc->bias.unsafeGetTensorImpl()] = std::make_unique<OwnState>();
  CHECK_THROWS_AS(stored(net, own), c10::Error);
}

TEST_CASE("two models and two optimizers, one behind a pointer") {
  const auto generator = std::make_shared<NetImpl>();
  Net a(generator), b, a2, b2;
  optim::Adam first(a->parameters()), second(b->parameters(), optim::AdamOptions(0.5));
  auto pointed = std::make_unique<optim::Adam>(b2->parameters());
  optim::Adam first2(a2->parameters());
  train(a, first, 2);
  train(b, second, 1);
  const State saved = stored(a, first, b, second);
  CHECK(saved.has("model.1/fc.weight"));
  CHECK(saved.has("optimizer.1/model.1/fc.weight/exp_avg"));
  restore_all(saved, a2, first2, b2, pointed);
  CHECK(difference(stored(a2, first2, b2, pointed), saved) == "");
  CHECK(difference(stored(generator, first, b, second), saved) == "");

  CHECK_THROWS_AS(restore_all(saved, a2, first2), c10::Error);      // two models were saved
  CHECK_THROWS_AS(restore_all(saved, a2, first2, b2), c10::Error);  // and two optimizers
  CHECK_THROWS_AS(restore_all(stored(a, first), a2, first2, b2, pointed), c10::Error);
}
