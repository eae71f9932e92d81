#include "support/catch.hpp"
#include "support/operators.hpp"
#include "support/tensor_archive.hpp"

#include <frugal/averager.hpp>

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

using frugal::Averager;
using frugal::DecayRamp;

namespace {

struct NetImpl : torch::nn::Module {
  explicit NetImpl(at::ScalarType dtype = at::kFloat) {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(4, 3));
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    second = register_module("second", torch::nn::Linear(3, 2));
    to(dtype);
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

std::vector<at::Tensor> values(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const auto& parameter : module.parameters()) all.push_back(parameter.detach().clone());
  return all;
}

bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].scalar_type() != b[i].scalar_type() ||
        std::memcmp(a[i].const_data_ptr(), b[i].const_data_ptr(), a[i].nbytes()) != 0)
      return false;
  return true;
}

void step(torch::nn::Module& module, double size = 0.1) {
  const torch::NoGradGuard off;
  for (auto& parameter : module.parameters())
    if (parameter.requires_grad()) parameter.add_(torch::randn_like(parameter), size);
}

// The average in double, by the formula.
struct Reference {
  std::vector<at::Tensor> average;
  void update(const torch::nn::Module& module, double decay) {
    const auto now = values(module);
    if (average.empty()) {
      for (const auto& value : now) average.push_back(value.to(at::kDouble));
      return;
    }
    for (std::size_t i = 0; i < now.size(); ++i) average[i] = decay * average[i] + (1 - decay) * now[i].to(at::kDouble);
  }
  bool close_to(const torch::nn::Module& module, double tolerance = 1e-6) const {
    const auto now = values(module);
    for (std::size_t i = 0; i < now.size(); ++i)
      if (!now[i].to(at::kDouble).allclose(average[i], tolerance, tolerance)) return false;
    return true;
  }
};

}  // namespace

TEST_CASE("Averager: the average follows the formula, in double and single precision") {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    Net model(dtype);
    Averager averager({.decay = 0.9, .ramp = DecayRamp::none});
    Reference reference;
    for (int i = 0; i < 20; ++i) {
      step(*model);
      averager.update(model);
      reference.update(*model, 0.9);
    }
    CHECK_FALSE(reference.close_to(*model));
    averager.swap(model);
    CHECK(reference.close_to(*model));
  }
}

TEST_CASE("Averager: the early ramp is min(decay, (1 + n) / (10 + n))") {
  Net model;
  Averager averager({.decay = 0.3});
  Reference reference;
  for (const double decay : {0.1, 2.0 / 11, 3.0 / 12, 0.3, 0.3}) {
    CHECK(averager.decay() == Approx(decay));
    step(*model);
    averager.update(model);
    reference.update(*model, decay);
  }
  averager.swap(model);
  CHECK(reference.close_to(*model));
}

TEST_CASE("Averager: swap exchanges weights and average bit for bit, both ways, buffers excepted") {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    Net model(dtype);
    Averager averager({.decay = 0.5});
    for (int i = 0; i < 5; ++i) step(*model), averager.update(model);
    model->norm->running_mean.fill_(7);
    const auto weights = values(*model);
    TensorArchive before, after;
    averager.save(before);
    averager.swap(model);
    CHECK(averager.swapped());
    const auto average = values(*model);
    CHECK_FALSE(same_bits(weights, average));
    CHECK(model->norm->running_mean[0].item<double>() == 7);
    averager.swap(model);
    CHECK_FALSE(averager.swapped());
    CHECK(same_bits(weights, values(*model)));
    averager.swap(model);
    CHECK(same_bits(average, values(*model)));
    averager.swap(model);
    CHECK(same_bits(weights, values(*model)));
    averager.save(after);  // the average itself was not rounded on the way
    const auto average_of_weight = [](const TensorArchive& saved) {
      return saved.get<at::Tensor>("average.first.weight");
    };
    CHECK(average_of_weight(before).equal(average_of_weight(after)));
  }
}

TEST_CASE("Averager: low-precision weights are averaged in float32") {
  Net model(at::kBFloat16);
  Averager averager({.decay = 0.999, .ramp = DecayRamp::none});
  Reference reference;
  averager.update(model);
  reference.update(*model, 0);
  {
    const torch::NoGradGuard off;
    for (auto& parameter : model->parameters()) parameter.add_(1);
  }
  for (int i = 0; i < 500; ++i) {  // steps of a thousandth, which bfloat16 would round away
    averager.update(model);
    reference.update(*model, 0.999);
  }
  averager.swap(model);
  CHECK(reference.close_to(*model, 8e-3));  // rounded to bfloat16 once
}

TEST_CASE("Averager: decay 0 switches it off, and nothing is averaged before the first update") {
  Net model;
  const auto before = values(*model);
  Averager off({.decay = 0}), fresh;
  {
    const Operators operators;
    off.update(model);
    off.swap(model);
    fresh.swap(model);
    CHECK(operators.total() == 0);
  }
  CHECK_FALSE(off.averaging());
  CHECK_FALSE(fresh.averaging());
  CHECK(same_bits(before, values(*model)));
  fresh.update(model);
  CHECK(fresh.averaging());
  frugal::Readings now;
  off.readings(now);
  CHECK(now.size() == 0);
  fresh.readings(now);
  CHECK(now.find("decay") == Approx(2.0 / 11));
}

TEST_CASE("Averager: every nth update counts") {
  Net model;
  Averager averager({.decay = 0.5, .every = 3, .ramp = DecayRamp::none});
  Reference reference;
  for (int i = 1; i <= 8; ++i) {
    step(*model);
    averager.update(model);
    CHECK(averager.averaging() == (i >= 3));
    if (i % 3 == 0) reference.update(*model, 0.5);
  }
  averager.swap(model);
  CHECK(reference.close_to(*model));
}

TEST_CASE("Averager: takes a Module, a holder and a shared_ptr") {
  NetImpl plain;
  auto shared = std::make_shared<NetImpl>();
  torch::nn::Sequential holder(torch::nn::Linear(2, 2));
  const auto averages = [](auto& model, torch::nn::Module& module) {
    Averager averager({.decay = 0.5});
    averager.update(model);
    const auto at_update = values(module);
    step(module);
    averager.swap(model);
    return same_bits(at_update, values(module));
  };
  CHECK(averages(plain, plain));
  CHECK(averages(shared, *shared));
  CHECK(averages(holder, *holder));
  STATIC_REQUIRE(frugal::AveragingPolicy<Averager, Net>);
  STATIC_REQUIRE(frugal::AveragingPolicy<Averager, NetImpl>);
}

TEST_CASE("Averager: in host memory it moves as LibTorch's lerp does, wherever and however tensors lie") {
  torch::manual_seed(4);
  frugal::detail::Lerp lerp;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    for (const double weight : {0.001, 0.4999, 0.5, 0.9, 1.0}) {
      std::vector<at::Tensor> to, expected, from;
      for (const std::int64_t size : {1, 3, 4, 5, 17, 100, 70000}) {
        to.push_back(torch::randn({size}).to(dtype));
        from.push_back(torch::randn({size + 1}).to(dtype).narrow(0, 1, size));  // not at the start of its memory
      }
      to.push_back(torch::randn({5, 7}).to(dtype).t()), from.push_back(torch::randn({5, 7}).to(dtype).t());
      for (const bool side_by_side : {true, false}) {
        if (!side_by_side)
          to.push_back(torch::randn({5, 7}).to(dtype).t()), from.push_back(torch::randn({7, 5}).to(dtype));
        expected.clear();
        for (const auto& tensor : to) expected.push_back(tensor.clone());
        at::_foreach_lerp_(expected, from, weight);
        lerp(to, from, weight);
        for (std::size_t i = 0; i < to.size(); ++i) CHECK(to[i].allclose(expected[i], 1e-6, 1e-7));
      }
    }
}

TEST_CASE("Averager: no operator for float on a CPU, one kernel for another dtype, no read, and no frozen parameter") {
  Net model;
  model->second->to(at::kBFloat16);
  model->first->weight.requires_grad_(false);
  Averager averager({.decay = 0.5, .ramp = DecayRamp::none});
  averager.update(model);
  {
    const Operators operators;
    averager.update(model);
    CHECK(operators["aten::_foreach_lerp_"] == 0);  // float32
    CHECK(operators["aten::_foreach_mul_"] == 1);   // bfloat16
    CHECK(operators["aten::_foreach_add_"] == 1);
    CHECK(operators.reads() == 0);
    CHECK(operators["aten::clone"] + operators["aten::empty_like"] == 0);
  }
  {
    const torch::NoGradGuard off;
    model->first->weight.fill_(3);
  }
  averager.swap(model);
  CHECK(model->first->weight[0][0].item<double>() == 3);  // nobody averaged it
  averager.swap(model);

  model->first->weight.requires_grad_(true);  // unfrozen: its average starts here
  averager.update(model);
  {
    const torch::NoGradGuard off;
    model->first->weight.fill_(5);
  }
  averager.swap(model);
  CHECK(model->first->weight[0][0].item<double>() == 3);
}

TEST_CASE("Averager: tied parameters are exchanged once") {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      inner = register_module("a", torch::nn::Linear(2, 2));
      register_module("b", inner);
    }
    torch::nn::Linear inner{nullptr};
  };
  auto model = std::make_shared<TiedImpl>();
  Averager averager({.decay = 0.5});
  averager.update(model);
  const auto at_update = model->inner->weight.detach().clone();
  step(*model->inner);
  const auto weights = model->inner->weight.detach().clone();
  averager.swap(model);
  CHECK(model->inner->weight.equal(at_update));
  averager.swap(model);
  CHECK(model->inner->weight.equal(weights));
}

TEST_CASE("Averager: no cast of the other weights is used after a swap") {
  at::autocast::clear_cache();
  struct ProductImpl : torch::nn::Module {
    ProductImpl() { w = register_parameter("w", torch::ones({2, 2})); }
    at::Tensor w;
  };
  auto model = std::make_shared<ProductImpl>();
  Averager averager({.decay = 0.5});
  averager.update(model);
  {
    const torch::NoGradGuard off;
    model->w.fill_(3);
  }
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto value = [&] { return torch::ones({1, 2}).mm(model->w).sum().item<float>(); };
  CHECK(value() == 12);
  averager.swap(model);
  CHECK(value() == 4);
  averager.swap(model);
  CHECK(value() == 12);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
}

TEST_CASE("Averager: a reloaded average goes on exactly as the saved one") {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const bool swapped : {false, true}) {
      Net model(dtype), again(dtype);
      Averager saved({.decay = 0.7}), loaded({.decay = 0.7});
      for (int i = 0; i < 3; ++i) step(*model), saved.update(model);
      if (swapped) saved.swap(model);
      TensorArchive archive;
      saved.save(archive);
      loaded.load(archive);
      {
        const torch::NoGradGuard off;
        const auto now = values(*model);
        for (std::size_t i = 0; i < now.size(); ++i) again->parameters()[i].copy_(now[i]);  // what a checkpoint does
      }
      CHECK(loaded.averaging());
      CHECK(loaded.swapped() == swapped);
      TensorArchive twice;  // before the model was seen
      loaded.save(twice);
      CHECK(twice.get<at::Tensor>("average.first.weight").equal(archive.get<at::Tensor>("average.first.weight")));
      if (swapped) saved.swap(model), loaded.swap(again);
      CHECK(same_bits(values(*model), values(*again)));
      torch::manual_seed(1);
      step(*model), saved.update(model);
      torch::manual_seed(1);
      step(*again), loaded.update(again);
      saved.swap(model), loaded.swap(again);
      CHECK(same_bits(values(*model), values(*again)));
      saved.swap(model), loaded.swap(again);
      CHECK(same_bits(values(*model), values(*again)));
    }
}

TEST_CASE("Averager: the state of another model is an error that names the parameter") {
  Net model;
  Averager saved;
  saved.update(model);
  TensorArchive archive;
  saved.save(archive);
  const auto load_into = [&](auto other) {
    Averager averager;
    averager.load(archive);
    averager.update(other);
  };
  CHECK_THROWS_WITH(load_into(torch::nn::Sequential(torch::nn::Linear(2, 2))),
                    ContainsSubstring("'first.weight'") && ContainsSubstring("this model has not"));
  Net more, wide(at::kDouble), reshaped;
  more->register_parameter("extra", torch::zeros({1}));
  CHECK_THROWS_WITH(load_into(more), ContainsSubstring("'extra'") && ContainsSubstring("the average has not"));
  CHECK_THROWS_WITH(load_into(wide), ContainsSubstring("first.weight") && ContainsSubstring("Double"));
  reshaped->second->weight.set_data(torch::zeros({3, 2}));  // as many elements
  CHECK_THROWS_WITH(load_into(reshaped), ContainsSubstring("second.weight") && ContainsSubstring("[3, 2]"));
}

TEST_CASE("Averager: mistakes are errors") {
  CHECK_THROWS_WITH(Averager({.decay = 1}), ContainsSubstring("decay is 1"));
  CHECK_THROWS(Averager({.decay = -0.1}));
  CHECK_THROWS_WITH(Averager({.every = 0}), ContainsSubstring("every is 0"));
  Net model, other;
  Averager averager;
  averager.update(model);
  averager.swap(model);
  CHECK_THROWS_WITH(averager.update(model), ContainsSubstring("Call swap() first"));
  CHECK_THROWS_WITH(averager.swap(other), ContainsSubstring("another model"));
  averager.swap(model);
  Averager again;
  again.update(model);
  again.reset();
  CHECK_FALSE(again.averaging());
  CHECK(again.decay() == Approx(0.1));
  averager.to(at::kCPU);
  Averager moved(std::move(averager));
  step(*model);
  CHECK_NOTHROW(moved.update(model));
  CHECK_NOTHROW(moved.update(other));  // another instance of the same model takes the average over
}
