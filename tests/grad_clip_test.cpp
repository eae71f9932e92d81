#include "support/catch.hpp"
#include "support/operators.hpp"

#include <frugal/grad_clip.hpp>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

using frugal::GradClip;

namespace {

const double infinity = std::numeric_limits<double>::infinity(), nan_value = std::numeric_limits<double>::quiet_NaN();

// Parameters of `shapes` with gradients drawn from a normal distribution.
torch::optim::SGD with_gradients(const std::vector<std::vector<std::int64_t>>& shapes, double size = 1) {
  torch::manual_seed(3);
  std::vector<at::Tensor> parameters;
  for (const auto& shape : shapes) {
    parameters.push_back(torch::zeros(shape).requires_grad_());
    parameters.back().mutable_grad() = torch::randn(shape) * size;
  }
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(1.0));
}

std::vector<at::Tensor> gradients_of(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params())
      if (parameter.grad().defined()) all.push_back(parameter.grad().clone());
  return all;
}

bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(a[i].const_data_ptr(), b[i].const_data_ptr(), a[i].nbytes()) != 0) return false;
  return true;
}

torch::optim::SGD sgd(std::vector<at::Tensor> parameters) {
  return torch::optim::SGD(std::move(parameters), torch::optim::SGDOptions(1.0));
}

at::Tensor parameter(const at::Tensor& gradient) {
  at::Tensor w = torch::zeros_like(gradient).requires_grad_();
  w.mutable_grad() = gradient.clone();
  return w;
}

}  // namespace

TEST_CASE("GradClip: clips by the joint norm as clip_grad_norm_ does") {
  for (const double size : {0.01, 1.0, 1000.0})
    for (const double max_norm : {0.5, 1.0, 7.0}) {
      auto ours = with_gradients({{3, 4}, {5}, {2, 2, 2}, {}}, size),
           theirs = with_gradients({{3, 4}, {5}, {2, 2, 2}, {}}, size);
      GradClip clip(max_norm);
      clip.clip(ours);
      const double norm = torch::nn::utils::clip_grad_norm_(theirs.param_groups()[0].params(), max_norm);
      CHECK(clip.norm() == Approx(norm).epsilon(1e-6));
      const auto a = gradients_of(ours), b = gradients_of(theirs);
      for (std::size_t i = 0; i < a.size(); ++i) CHECK(a[i].allclose(b[i], 1e-6, 0));
    }
}

TEST_CASE("GradClip: gradients within the bound keep their bits") {
  auto optimizer = with_gradients({{3, 4}, {5}}, 0.1);
  const auto before = gradients_of(optimizer);
  GradClip(100).clip(optimizer);
  CHECK(same_bits(before, gradients_of(optimizer)));
  GradClip::by_value(100).clip(optimizer);
  CHECK(same_bits(before, gradients_of(optimizer)));
}

TEST_CASE("GradClip: a window with inf or NaN is left exactly as it is, in both modes") {
  for (const double bad : {infinity, -infinity, nan_value}) {
    auto optimizer = with_gradients({{3, 4}, {5}}, 10);
    optimizer.param_groups()[0].params()[1].mutable_grad()[2] = bad;
    const auto before = gradients_of(optimizer);
    GradClip clip(1), limit = GradClip::by_value(0.1);
    clip.clip(optimizer);
    CHECK(same_bits(before, gradients_of(optimizer)));
    CHECK_FALSE(std::isfinite(clip.norm()));
    limit.clip(optimizer);
    CHECK(same_bits(before, gradients_of(optimizer)));
  }
}

TEST_CASE("GradClip: by value takes every element into the limits") {
  at::Tensor w = parameter(torch::tensor({-3.0F, -0.2F, 0.0F, 0.4F, 8.0F})),
             half = parameter(torch::full({2}, -9.0F).to(at::kHalf));
  auto optimizer = sgd({w, half});
  GradClip clip = GradClip::by_value(0.5);
  clip.clip(optimizer);
  CHECK(w.grad().equal(torch::tensor({-0.5F, -0.2F, 0.0F, 0.4F, 0.5F})));
  CHECK(half.grad().to(at::kFloat).equal(torch::full({2}, -0.5F)));
  CHECK(std::isnan(clip.norm()));
}

TEST_CASE("GradClip: infinity switches it off, without a single operator") {
  auto optimizer = with_gradients({{3, 4}}, 1e6);
  const auto before = gradients_of(optimizer);
  GradClip clip(infinity), limit = GradClip::by_value(infinity);
  {
    const Operators operators;
    clip.clip(optimizer);
    limit.clip(optimizer);
    CHECK(operators.total() == 0);
  }
  CHECK(same_bits(before, gradients_of(optimizer)));
  CHECK(std::isnan(clip.norm()));
  frugal::Readings now;
  clip.readings(now);
  CHECK(now.size() == 0);
}

TEST_CASE("GradClip: nothing is read back, and no operator measures float gradients in host memory") {
  auto optimizer = with_gradients({{3, 4}, {5}}, 10);
  GradClip clip(1), limit = GradClip::by_value(1);
  const Operators operators;
  for (int i = 0; i < 3; ++i) clip.clip(optimizer), limit.clip(optimizer);
  CHECK(clip.norm() > 0);
  CHECK(operators.reads() == 0);
  CHECK(operators["aten::_foreach_norm"] == 0);
  CHECK(operators["aten::linalg_vector_norm"] == 0);
}

TEST_CASE("GradClip: a joint norm beyond float's range is a norm like any other") {
  at::Tensor w = parameter(torch::full({4}, 3e30F)), wide = parameter(torch::full({1}, 8e30, torch::kDouble));
  auto optimizer = sgd({w, wide});
  GradClip clip(1.0);
  clip.clip(optimizer);
  CHECK(clip.norm() == Approx(1e31));
  CHECK(w.grad().allclose(torch::full({4}, 0.3F), 1e-5));
  CHECK(wide.grad().item<double>() == Approx(0.8));
}

TEST_CASE("GradClip: the coefficient on a device is the one on the CPU") {
  const auto coefficient = [](double norm) {
    return frugal::detail::clip_coefficient(torch::full({}, norm, torch::kFloat), 2.0).item<double>();
  };
  CHECK(coefficient(8) == Approx(2 / (8 + 1e-6)));
  CHECK(coefficient(1) == 1);
  CHECK(coefficient(0) == 1);
  CHECK(coefficient(infinity) == 1);
  CHECK(coefficient(nan_value) == 1);

  for (const auto dtype : {at::kFloat, at::kHalf, at::kDouble}) {
    std::vector<at::Tensor> gradients{torch::tensor({-3.0, 0.25, 8.0}, dtype), torch::full({}, 4.0, dtype)};
    frugal::detail::clamp_if_finite(gradients, torch::full({}, infinity), 0.5);
    CHECK(gradients[0].equal(torch::tensor({-3.0, 0.25, 8.0}, dtype)));
    frugal::detail::clamp_if_finite(gradients, torch::full({}, nan_value), 0.5);
    CHECK(gradients[1].equal(torch::full({}, 4.0, dtype)));
    frugal::detail::clamp_if_finite(gradients, torch::full({}, 8.0), 0.5);
    CHECK(gradients[0].equal(torch::tensor({-0.5, 0.25, 0.5}, dtype)));
    CHECK(gradients[1].equal(torch::full({}, 0.5, dtype)));
  }
}

TEST_CASE("GradClip: several dtypes, sparse and missing gradients count together") {
  at::Tensor single = parameter(torch::tensor({3.0F})), wide = parameter(torch::tensor({4.0}, torch::kDouble)),
             half = parameter(torch::full({1}, 12.0F).to(at::kHalf)), table = torch::zeros({3, 1}).requires_grad_(),
             unused = torch::zeros({2}).requires_grad_();
  const auto rows = torch::tensor({1, 1}).unsqueeze(0);  // one row twice: 42 + 42
  table.mutable_grad() = torch::sparse_coo_tensor(rows, torch::full({2, 1}, 42.0F), {3, 1});
  auto optimizer = sgd({single, wide, half, table, unused});
  GradClip clip(8.5);
  clip.clip(optimizer);
  CHECK(clip.norm() == Approx(85.0));  // 3, 4, 12, 84: 13 and 84
  CHECK(single.grad().item<double>() == Approx(0.3));
  CHECK(wide.grad().item<double>() == Approx(0.4));
  CHECK(half.grad().item<double>() == Approx(1.2).epsilon(1e-3));
  CHECK(table.grad().to_dense()[1].item<double>() == Approx(8.4));
  CHECK_FALSE(unused.grad().defined());
}

TEST_CASE("GradClip: a gradient that waits to be conjugated or negated is clipped like any other") {
  const at::Tensor values = torch::complex(torch::tensor({{3.0F}, {0.0F}}), torch::tensor({{0.0F}, {4.0F}}));
  const auto rows = torch::tensor({0, 1}).unsqueeze(0);
  const auto sparse = [&](const at::Tensor& lazy) { return torch::sparse_coo_tensor(rows, lazy, {2, 1}); };
  const at::Tensor conjugate = values.conj(), negative = at::imag(conjugate);  // -4 in the second row
  REQUIRE((conjugate.is_conj() && negative.is_neg()));
  for (const bool by_norm : {true, false}) {
    GradClip clip = by_norm ? GradClip(1.0) : GradClip::by_value(1.0);
    const auto clipped = [&](const at::Tensor& lazy) {
      at::Tensor w = torch::zeros({2, 1}, lazy.options()).requires_grad_();
      w.mutable_grad() = lazy;
      auto optimizer = sgd({w});
      clip.clip(optimizer);
      const at::Tensor found = w.grad().is_sparse() ? w.grad().coalesce().to_dense() : w.grad();
      return found.resolve_conj();
    };
    const at::Tensor dense = clipped(conjugate.resolve_conj()), real = clipped(negative.resolve_neg());
    CHECK(at::imag(dense)[1].item<double>() == Approx(by_norm ? -0.8 : -1));
    CHECK(clipped(conjugate).equal(dense));
    CHECK(clipped(negative).equal(real));
    CHECK(clipped(sparse(conjugate)).equal(dense));
    CHECK(clipped(sparse(negative)).equal(real));
  }
  at::Tensor w = torch::complex(torch::tensor({3.0F}), torch::tensor({4.0F})).requires_grad_();
  at::real(w.conj() * w.detach()).sum().backward();  // as autograd leaves it
  auto optimizer = sgd({w});
  GradClip clip(1.0);
  clip.clip(optimizer);
  CHECK(clip.norm() == Approx(5));
}

TEST_CASE("GradClip: a tied parameter counts once, twice in a group or in two") {
  at::Tensor w = parameter(torch::tensor({3.0F, 4.0F}));
  auto optimizer = sgd({w, w});
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({parameter(torch::zeros({1}))}));
  optimizer.param_groups()[1].params().push_back(w);
  GradClip clip(1.0);
  clip.clip(optimizer);
  CHECK(clip.norm() == Approx(5));
  CHECK(w.grad().norm().item<double>() == Approx(1));
}

TEST_CASE("GradClip: low-precision norms are taken in float32, where they do not overflow") {
  at::Tensor half = parameter(torch::full({100}, 1000.0F).to(at::kHalf));  // squares beyond 65504
  auto optimizer = sgd({half});
  GradClip clip(100);
  clip.clip(optimizer);
  CHECK(clip.norm() == Approx(10000));
  CHECK(half.grad()[0].item<double>() == Approx(10).epsilon(1e-3));
}

TEST_CASE("GradClip: without gradients the norm is 0") {
  at::Tensor w = torch::zeros({2}).requires_grad_(), empty = parameter(torch::zeros({0}));
  auto optimizer = sgd({w, empty});
  GradClip clip(1), limit = GradClip::by_value(1);
  CHECK(std::isnan(clip.norm()));
  clip.clip(optimizer);
  limit.clip(optimizer);
  CHECK(clip.norm() == 0);
}

TEST_CASE("GradClip: it holds no gradient after the call, and records nothing for autograd") {
  at::Tensor w = torch::full({2}, 3.0F).requires_grad_();
  w.square().sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  auto optimizer = sgd({w});
  GradClip clip(1);
  clip.clip(optimizer);
  CHECK(clip.norm() == Approx(6 * std::sqrt(2.0)));
  const c10::weak_intrusive_ptr<c10::TensorImpl> gradient(w.grad().getIntrusivePtr());
  optimizer.zero_grad();
  w.mutable_grad().reset();
  CHECK(gradient.expired());
}

TEST_CASE("GradClip: publishes the norm, and refuses bounds that are not positive") {
  at::Tensor w = parameter(torch::tensor({3.0F, 4.0F}));
  auto optimizer = sgd({w});
  GradClip clip(1);
  clip.clip(optimizer);
  frugal::Readings now;
  clip.readings(now);
  CHECK(now.find("norm") == 5.0);

  CHECK_THROWS_WITH(GradClip(0), ContainsSubstring("max_norm is 0") && ContainsSubstring("infinity"));
  CHECK_THROWS(GradClip(-1));
  CHECK_THROWS(GradClip(nan_value));
  CHECK_THROWS_WITH(GradClip::by_value(-2), ContainsSubstring("limit is -2"));
  STATIC_REQUIRE(frugal::ClippingPolicy<GradClip, torch::optim::Adam>);
  STATIC_REQUIRE(std::is_nothrow_move_constructible_v<GradClip>);
}
