#include "support/catch.hpp"

#include <frugal/state_guard.hpp>

#include <ATen/autocast_mode.h>

#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

using frugal::StateGuard;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

// A child that two modules hold, BatchNorm and dropout, a buffer, a parameter that is frozen, and one that nobody uses.
struct NetImpl : torch::nn::Module {
  torch::nn::Linear in{4, 8}, out{8, 2};
  torch::nn::BatchNorm1d norm{8};
  torch::nn::Dropout dropout{0.5};
  torch::nn::Sequential outer{nullptr};
  torch::Tensor calls, frozen, unused, wide;

  NetImpl() {
    register_module("in", in), register_module("norm", norm);
    register_module("dropout", dropout), register_module("out", out);
    outer = register_module("outer", torch::nn::Sequential(dropout));
    calls = register_buffer("calls", torch::zeros({}, torch::kLong));
    wide = register_buffer("wide", torch::randn({3}).expand({5, 3}));
    frozen = register_parameter("frozen", torch::randn({3}), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::randn({3}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    calls += 1;
    return out(dropout(torch::relu(norm(in(x)))));
  }
};
TORCH_MODULE(Net);

void train(Net& net, torch::optim::Optimizer& optimizer, int steps = 3) {
  net->train();
  for (int i = 0; i < steps; ++i) {
    net->forward(torch::randn({6, 4})).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

// Everything that a guard promises, as text and tensors.
struct Everything {
  std::map<std::string, torch::Tensor> tensors;
  std::map<std::string, std::string> facts;

  void add(const std::string& name, const torch::Tensor& tensor) {
    facts[name] = tensor.defined() ? "defined" : "undefined";
    if (!tensor.defined()) return;
    tensors[name] = tensor.detach().clone();
    facts[name + " at"] = std::to_string(reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()));
    facts[name + " needs"] = std::to_string(tensor.requires_grad());
  }
  bool operator==(const Everything& other) const {
    if (facts != other.facts || tensors.size() != other.tensors.size()) return false;
    for (const auto& [name, tensor] : tensors)
      if (!torch::equal(tensor, other.tensors.at(name)) || tensor.dtype() != other.tensors.at(name).dtype())
        return false;
    return true;
  }
};

Everything everything(Net& net, torch::optim::Optimizer& optimizer) {
  Everything all;
  for (auto& item : net->named_parameters()) {
    all.add(item.key(), item.value());
    all.add(item.key() + ".grad", item.value().grad());
    const auto found = optimizer.state().find(item.value().unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    const bool known = frugal::detail::each_state_tensor(
        *found->second, [&, i = 0](const torch::Tensor& t) mutable { all.add(item.key() + std::to_string(i++), t); });
    REQUIRE(known);
    if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(found->second.get()))
      all.facts[item.key() + " step"] = std::to_string(adam->step());
  }
  for (auto& item : net->named_buffers()) all.add(item.key(), item.value());
  for (auto& item : net->named_modules()) all.facts["mode " + item.key()] = std::to_string(item.value()->is_training());
  all.facts["states"] = std::to_string(optimizer.state().size());
  for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const auto& group = optimizer.param_groups()[i];
    all.facts["group " + std::to_string(i)] = std::to_string(group.params().size());
    all.facts["rate " + std::to_string(i)] = std::to_string(group.options().get_lr());
    all.facts["options " + std::to_string(i)] = std::to_string(reinterpret_cast<std::uintptr_t>(&group.options()));
  }
  all.facts["default rate"] = std::to_string(optimizer.defaults().get_lr());
  all.tensors["random"] = at::globalContext().defaultGenerator(torch::kCPU).get_state();
  return all;
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(Net&)>;

std::vector<Make> optimizers() {
  return {
      [](Net& net) { return std::make_unique<Adam>(net->parameters(), AdamOptions(0.1).amsgrad(true)); },
      [](Net& net) { return std::make_unique<SGD>(net->parameters(), SGDOptions(0.1).momentum(0.9)); },
      [](Net& net) { return std::make_unique<torch::optim::AdamW>(net->parameters()); },
      [](Net& net) { return std::make_unique<torch::optim::Adagrad>(net->parameters()); },
      [](Net& net) {
        return std::make_unique<torch::optim::RMSprop>(net->parameters(),
                                                       torch::optim::RMSpropOptions(0.1).momentum(0.9).centered(true));
      },
  };
}

// Everything that a run could do to them.
void ravage(Net& net, torch::optim::Optimizer& optimizer) {
  train(net, optimizer);
  const torch::NoGradGuard no_grad;
  net->eval();
  net->norm->train();
  net->unused.set_requires_grad(false);
  net->frozen.set_requires_grad(true);
  net->frozen.mutable_grad() = torch::ones({3});
  for (auto& parameter : net->parameters()) parameter.fill_(std::numeric_limits<double>::quiet_NaN());
  for (auto& buffer : net->buffers())
    if (!buffer.is_same(net->wide)) buffer.add_(7);
  net->in->weight.set_data(torch::ones({2, 2}, torch::kDouble));
  optimizer.param_groups()[0].options().set_lr(99);
  optimizer.defaults().set_lr(98);
  optimizer.param_groups()[0].params().pop_back();
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({torch::ones({2}).set_requires_grad(true)}));
  torch::manual_seed(99);
}

}  // namespace

TEST_CASE("StateGuard leaves no trace of anything, before and after the optimizer's first step") {
  for (const Make& make : optimizers())
    for (const int steps_before : {0, 2}) {
      torch::manual_seed(1);
      Net net;
      const auto optimizer = make(net);
      train(net, *optimizer, steps_before);
      net->forward(torch::randn({6, 4})).sum().backward();  // some have gradients, others have not
      net->norm->eval();                                    // a mixed mode
      torch::randn({3});                                    // the generator holds half of a pair
      const Everything before = everything(net, *optimizer);
      {
        const StateGuard guard(net, *optimizer);
        REQUIRE_FALSE(net->in->weight.grad().defined());
        ravage(net, *optimizer);
        REQUIRE_FALSE(everything(net, *optimizer) == before);
      }
      REQUIRE(everything(net, *optimizer).facts == before.facts);
      REQUIRE(everything(net, *optimizer) == before);
    }
}

TEST_CASE("StateGuard: a run goes on as if the guarded one had not been") {
  const auto trained = [](bool guarded) {
    torch::manual_seed(2);
    Net net;
    Adam optimizer(net->parameters(), AdamOptions(0.05));
    train(net, optimizer, 3);
    if (guarded) {
      const StateGuard guard(net, optimizer);
      ravage(net, optimizer);
    }
    train(net, optimizer, 3);
    return net->out->weight.detach().clone();
  };
  REQUIRE(trained(true).equal(trained(false)));
}

TEST_CASE("StateGuard restores when an exception leaves its scope") {
  Net net;
  SGD optimizer(net->parameters(), SGDOptions(0.1).momentum(0.9));
  train(net, optimizer);
  const Everything before = everything(net, optimizer);
  const auto fail = [&] {
    const StateGuard guard(net, optimizer);
    ravage(net, optimizer);
    throw std::runtime_error("no");
  };
  REQUIRE_THROWS_WITH(fail(), "no");
  REQUIRE(everything(net, optimizer) == before);
}

TEST_CASE("StateGuard restores whenever it is asked to, and once more at the end") {
  Net net;
  Adam optimizer(net->parameters(), AdamOptions(0.1));
  train(net, optimizer);
  net->forward(torch::randn({6, 4})).sum().backward();
  const torch::Tensor gradient = net->out->bias.grad().clone();
  const Everything before = everything(net, optimizer);
  {
    StateGuard guard(net, optimizer);
    for (int i = 0; i < 3; ++i) {
      ravage(net, optimizer);
      guard.restore();
      REQUIRE(net->out->bias.grad().equal(gradient));
      REQUIRE(everything(net, optimizer).tensors.at("random").equal(before.tensors.at("random")));
      net->forward(torch::randn({6, 4})).sum().backward();  // accumulates into the gradient that is there again
      REQUIRE_FALSE(net->out->bias.grad().equal(gradient));
    }
  }
  REQUIRE(everything(net, optimizer) == before);
}

TEST_CASE("StateGuard nests") {
  Net net;
  Adam optimizer(net->parameters(), AdamOptions(0.1));
  const Everything start = everything(net, optimizer);
  {
    const StateGuard outer(net, optimizer);
    train(net, optimizer);
    net->forward(torch::randn({6, 4})).sum().backward();
    const Everything middle = everything(net, optimizer);
    {
      const StateGuard inner(net, optimizer);
      ravage(net, optimizer);
    }
    REQUIRE(everything(net, optimizer) == middle);
  }
  REQUIRE(everything(net, optimizer) == start);
}

TEST_CASE("StateGuard restores the mode of parents before that of their children") {
  Net net;
  SGD optimizer(net->parameters(), SGDOptions(0.1));
  for (unsigned pattern = 0; pattern < 16; ++pattern) {
    net->train(pattern & 1U);
    net->outer->train(pattern & 2U);  // holds dropout, as the root does
    net->dropout->train(pattern & 4U);
    net->norm->train(pattern & 8U);
    const Everything before = everything(net, optimizer);
    for (const bool training : {false, true}) {
      {
        const StateGuard guard(net, optimizer);
        net->train(training);
      }
      REQUIRE(everything(net, optimizer) == before);
    }
  }
}

TEST_CASE("StateGuard empties the cache of casts") {
  Net net;
  SGD optimizer(net->parameters(), SGDOptions(0.1));
  const auto x = torch::randn({2, 2});
  auto weight = net->register_parameter("late", torch::randn({2, 2}));
  at::autocast::set_autocast_enabled(torch::kCPU, true);
  at::autocast::set_autocast_dtype(torch::kCPU, torch::kBFloat16);
  at::autocast::increment_nesting();
  const auto product = [&] { return x.mm(weight).detach().to(torch::kFloat); };
  const torch::Tensor before = x.to(torch::kBFloat16).mm(weight.to(torch::kBFloat16)).detach().to(torch::kFloat);
  {
    const StateGuard guard(net, optimizer);
    weight.detach().zero_();
    REQUIRE(product().equal(torch::zeros({2, 2})));  // cached
  }
  const torch::Tensor after = product();
  at::autocast::decrement_nesting();
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(torch::kCPU, false);
  REQUIRE(after.equal(before));
}

namespace {

struct Bare {
  torch::Tensor weight = torch::ones({3}).set_requires_grad(true);
  bool training = false;
  bool is_training() const { return training; }
  void train(bool mode) { training = mode; }
};
struct OnStack : torch::nn::Module { torch::Tensor weight = register_parameter("weight", torch::ones({3})); };
struct Custom {
  std::vector<torch::Tensor> parameters;
  torch::Tensor moment = torch::zeros({3});
  double rate = 1;
  struct Group {
    std::vector<torch::Tensor>& all;
    std::vector<torch::Tensor>& params() const { return all; }
  };
  std::vector<Group> param_groups() { return {Group{parameters}}; }
  void save(auto& out) const { out.write("moment", moment), out.write("rate", rate); }
  void load(auto& in) { in.read("moment", moment), in.read("rate", rate); }
};

}  // namespace

TEST_CASE("StateGuard takes modules, holders, pointers, structs, and optimizers with a state of their own") {
  SECTION("a module on the stack") {
    OnStack model;
    SGD optimizer(model.parameters(), SGDOptions(0.1));
    {
      const StateGuard guard(model, optimizer);
      model.weight.detach().zero_(), model.eval();
    }
    REQUIRE(model.weight.equal(torch::ones({3})));
    REQUIRE(model.is_training());
  }
  SECTION("a shared pointer") {
    auto model = std::make_shared<OnStack>();
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    {
      const StateGuard guard(model, optimizer);
      model->weight.detach().zero_();
    }
    REQUIRE(model->weight.equal(torch::ones({3})));
  }
  SECTION("a struct: the optimizer's parameters") {
    Bare model;
    SGD optimizer({model.weight}, SGDOptions(0.1));
    {
      const StateGuard guard(model, optimizer);
      model.weight.detach().zero_(), model.train(true);
    }
    REQUIRE(model.weight.equal(torch::ones({3})));
    REQUIRE_FALSE(model.training);
  }
  SECTION("an optimizer that saves and loads itself") {
    Bare model;
    Custom optimizer{.parameters = {model.weight}};
    {
      StateGuard guard(model, optimizer);
      for (int i = 0; i < 2; ++i) {
        model.weight.detach().zero_(), optimizer.moment.add_(1), optimizer.rate = 5;
        guard.restore();
        REQUIRE(optimizer.moment.equal(torch::zeros({3})));
      }
      optimizer.moment.add_(1);
    }
    REQUIRE(model.weight.equal(torch::ones({3})));
    REQUIRE(optimizer.moment.equal(torch::zeros({3})));
    REQUIRE(optimizer.rate == 1);
  }
  SECTION("LBFGS") {
    auto weight = torch::ones({3}).set_requires_grad(true);
    Bare model;
    torch::optim::LBFGS optimizer({weight}, torch::optim::LBFGSOptions(0.1).max_iter(3));
    const auto closure = [&] {
      optimizer.zero_grad();
      auto loss = weight.pow(4).sum();
      loss.backward();
      return loss;
    };
    optimizer.step(closure);
    const auto after = [&] {
      optimizer.step(closure), optimizer.step(closure);
      return weight.detach().clone();
    };
    torch::Tensor first;
    {
      StateGuard guard(model, optimizer);
      first = after();
    }
    REQUIRE(after().equal(first));
  }
}

TEST_CASE("StateGuard restores buffers that are sparse, or were made in inference mode") {
  torch::nn::Linear net(2, 2);
  SGD optimizer(net->parameters(), SGDOptions(0.1));
  const auto sparse = net->register_buffer("sparse", torch::eye(3).to_sparse());
  torch::Tensor inference;
  {
    const c10::InferenceMode mode;
    inference = torch::ones({2, 3}).t();
  }
  net->register_buffer("inference", inference);
  {
    const StateGuard guard(net, optimizer);
    sparse.zero_();
    const c10::InferenceMode mode;
    inference.zero_();
  }
  REQUIRE(sparse.to_dense().equal(torch::eye(3)));
  REQUIRE(inference.eq(1).all().item<bool>());
}

namespace {

struct Mine : torch::optim::OptimizerCloneableParamState<Mine> { torch::Tensor moment; };

}  // namespace

TEST_CASE("StateGuard refuses state that it cannot copy, and changes nothing") {
  Net net;
  SGD optimizer(net->parameters(), SGDOptions(0.1));
  net->forward(torch::randn({6, 4})).sum().backward();
  optimizer.state()[net->in->weight.unsafeGetTensorImpl()] = std::make_unique<Mine>();
  REQUIRE_THROWS_WITH(StateGuard(net, optimizer), ContainsSubstring("state of a class that is not LibTorch's"));
  REQUIRE(net->in->weight.grad().defined());
}
