#include "support/catch.hpp"
#include "support/operators.hpp"

#include <frugal/detail/gradient_norm.hpp>

#include <ATen/Parallel.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using namespace frugal::detail;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity(),
                 not_a_number = std::numeric_limits<double>::quiet_NaN();

at::Tensor with_gradient(const at::Tensor& gradient) {
  at::Tensor parameter = torch::zeros_like(gradient).requires_grad_();
  parameter.mutable_grad() = gradient;
  return parameter;
}
torch::optim::SGD of(std::vector<at::Tensor> gradients) {
  for (at::Tensor& gradient : gradients) gradient = with_gradient(gradient);
  return torch::optim::SGD(gradients, torch::optim::SGDOptions(1.0));
}

struct Measure {
  Gradients gradients;
  GradientNorm norm;

  double operator()(torch::optim::SGD& optimizer, Norm which = Norm::two) {
    const GradientSize size = norm.of(optimizer, gradients, which);
    CHECK_FALSE(size.device.defined());
    return size.host;
  }
  double operator()(std::vector<at::Tensor> list, Norm which = Norm::two) {
    auto optimizer = of(std::move(list));
    return (*this)(optimizer, which);
  }
};

template <class Value>
void check_every_length() {
  std::vector<Value> values(8300);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<Value>(std::sin(static_cast<double>(i * i)) * 3);
  for (const std::int64_t length : {0, 1, 3, 4, 15, 16, 17, 33, 100, 4095, 4096, 4097, 8192, 8200})
    for (const std::size_t from : {0, 1, 2, 3}) {  // anywhere in memory
      const Value* const at = values.data() + from;
      double squares = 0, largest = 0;
      for (std::int64_t i = 0; i < length; ++i) {
        squares += static_cast<double>(at[i]) * static_cast<double>(at[i]);
        largest = std::max(largest, std::abs(static_cast<double>(at[i])));
      }
      CHECK(sum_of_squares(at, length) == Approx(squares).epsilon(1e-6));
      CHECK(static_cast<double>(exact_sum_of_squares(at, length)) == Approx(squares).epsilon(1e-12));
      CHECK(static_cast<double>(largest_magnitude(at, length)) == largest);
    }
}

template <class Value>
void check_bad_everywhere() {
  std::vector<Value> values(67, Value{-2});
  for (std::size_t i = 0; i < values.size(); ++i)
    for (const double bad : {infinity, -infinity, not_a_number}) {
      const Value before = std::exchange(values[i], static_cast<Value>(bad));
      CHECK_FALSE(std::isfinite(sum_of_squares(values.data(), std::ssize(values))));
      CHECK_FALSE(std::isfinite(exact_sum_of_squares(values.data(), std::ssize(values))));
      const Value largest = largest_magnitude(values.data(), std::ssize(values));
      CHECK((std::isnan(bad) ? std::isnan(largest) : std::isinf(largest)));
      values[i] = before;
    }
}

}  // namespace

TEST_CASE("magnitudes of every length, from any place in memory") {
  check_every_length<float>();
  check_every_length<double>();
}

TEST_CASE("magnitudes: no infinity and no NaN is missed, wherever it is") {
  check_bad_everywhere<float>();
  check_bad_everywhere<double>();
  const std::vector<float> both{1, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 2};
  CHECK(std::isnan(largest_magnitude(both.data(), 4)));
}

TEST_CASE("the joint norm of gradients is the norm of all of them in a row") {
  torch::manual_seed(5);
  Measure measure;
  for (const std::int64_t size : {1, 100, 70000, 300000}) {  // the last ones are read in parts
    std::vector<at::Tensor> gradients{torch::randn({size}), torch::randn({}), torch::randn({7, 9}).t(),
                                      torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)};
    std::vector<at::Tensor> flat;
    for (const auto& gradient : gradients) flat.push_back(gradient.to(torch::kDouble).flatten());
    const at::Tensor row = torch::cat(flat);
    CHECK(measure(gradients) == Approx(row.norm().item<double>()).epsilon(1e-7));
    CHECK(measure(gradients, Norm::largest) == row.abs().max().item<double>());
    gradients[0] = gradients[0].to(torch::kDouble);  // of two dtypes
    CHECK(measure(gradients) == Approx(row.norm().item<double>()).epsilon(1e-7));
    CHECK(measure(gradients, Norm::largest) == row.abs().max().item<double>());
  }
  CHECK(measure(std::vector<at::Tensor>()) == 0);
  CHECK(measure({torch::zeros({0})}) == 0);
}

TEST_CASE("the joint norm does not depend on the number of threads") {
  torch::manual_seed(6);
  auto optimizer = of({torch::randn({100000}), torch::randn({3}), torch::randn({50000})});
  Measure measure;
  const int before = at::get_num_threads();
  std::vector<double> found;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    found.push_back(measure(optimizer));
  }
  at::set_num_threads(before);
  CHECK(found[0] == found[1]);
  CHECK(found[0] == found[2]);
}

TEST_CASE("the joint norm is right where squares overflow, and not finite only where a gradient is") {
  Measure measure;
  CHECK(measure({torch::full({5}, 3e30F), torch::full({4}, 4.0F)}) == Approx(std::sqrt(5.0) * 3e30).epsilon(1e-6));
  CHECK(measure({torch::full({1}, 3e200, torch::kDouble), torch::full({1}, 4e200, torch::kDouble)}) == Approx(5e200));
  CHECK(measure({torch::full({100000}, -3e38F)}) == Approx(3e38 * std::sqrt(1e5)).epsilon(1e-6));
  for (const double bad : {infinity, -infinity, not_a_number})
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf})
      for (const Norm norm : {Norm::two, Norm::largest}) {
        auto gradient = torch::ones({70000}, dtype);
        gradient[69999] = bad;
        CHECK_FALSE(std::isfinite(measure({torch::ones({3}), gradient, torch::ones({3}, torch::kDouble)}, norm)));
      }
}

TEST_CASE("gradients that are not plain rows of float or double are measured too") {
  Measure measure;
  const auto of_sixteen = torch::full({16}, 1000.0F).to(torch::kHalf);  // squares beyond 65504
  const auto spread = torch::full({1}, 3.0F).expand({16}),
             some = torch::full({10}, 5.0F).narrow(0, 2, 4).as_strided({2}, {2});
  const auto rows = torch::sparse_coo_tensor(torch::tensor({1, 1}).unsqueeze(0), torch::full({2, 1}, 42.0F), {3, 1});
  CHECK(measure({of_sixteen}) == Approx(4000));
  CHECK(measure({spread}) == Approx(12));
  CHECK(measure({some}) == Approx(5 * std::sqrt(2.0)));
  CHECK(measure({rows}) == Approx(84));
  CHECK(measure({torch::complex(torch::tensor({3.0F}), torch::tensor({4.0F}))}) == Approx(5));
  CHECK(measure({spread, rows, of_sixteen, torch::full({1}, 2.0, torch::kDouble)}) ==
        Approx(std::sqrt(12.0 * 12 + 84 * 84 + 4000.0 * 4000 + 4)));
  CHECK(measure({spread, rows, of_sixteen, some}, Norm::largest) == 1000);
}

TEST_CASE("the joint norm of float gradients on a CPU takes no operator") {
  auto optimizer = of({torch::randn({100000}), torch::randn({3, 4}), torch::randn({5}, torch::kDouble)});
  Measure measure;
  measure(optimizer);
  const Operators operators;
  measure(optimizer);
  CHECK(operators.total() == 0);
}

TEST_CASE("work is dealt out once, to any number of parts and threads") {
  const int before = at::get_num_threads();
  Threads threads;
  for (const int number : {1, 2, 3}) {
    at::set_num_threads(number);
    for (const std::int64_t parts : {1, 2, 5, 64, 2}) {
      std::vector<int> times(static_cast<std::size_t>(parts));
      threads.each(parts, [&](std::int64_t part) { ++times[static_cast<std::size_t>(part)]; });
      CHECK(times == std::vector<int>(static_cast<std::size_t>(parts), 1));
    }
  }
  at::set_num_threads(2);
  const auto fails = [](std::int64_t part) {
    if (part == 1) throw std::runtime_error("part 1");
  };
  CHECK_THROWS_WITH(threads.each(2, fails), "part 1");
  at::set_num_threads(before);
}
