#pragma once

#include <frugal/detail/gradients.hpp>
#include <frugal/detail/pending.hpp>
#include <frugal/detail/rows.hpp>
#include <frugal/detail/vectors.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <c10/core/Scalar.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace frugal::inline v0::detail {

enum class Norm { two, largest };

// A tensor of no dimension in host memory: a load, neither an operator nor a device read.
inline double host_value(const at::Tensor& scalar) {
  return scalar.scalar_type() == at::kDouble ? *scalar.const_data_ptr<double>()
                                             : static_cast<double>(*scalar.const_data_ptr<float>());
}

// Measures gradients in one reading pass. float and double on a CPU are read straight from memory, without an operator and
// without an allocation; the rest is LibTorch's, where float16 and bfloat16 are measured in float.
class GradientNorm {
 public:
  // The joint norm of all gradients of `optimizer`; 0 when there is none. Nothing is read back from a device.
  GradientSize of(auto& optimizer, Gradients& gradients, Norm norm) {
    double host = 0;
    others_.clear();
    gradients.each_kind(optimizer, [&](std::vector<at::Tensor>& list) {
      const at::ScalarType dtype = list[0].scalar_type();
      if (list[0].is_cpu() && dtype == at::kFloat) host = joint(host, read(floats_, list, norm), norm);
      else if (list[0].is_cpu() && dtype == at::kDouble) host = joint(host, read(doubles_, list, norm), norm);
      else others_.push_back(measured(list, norm));
    });
    const bool in_host_memory = std::ranges::all_of(others_, [](const at::Tensor& other) { return other.is_cpu(); });
    if (!in_host_memory) return {.device = on_device(host, norm)};
    for (const at::Tensor& other : others_) host = joint(host, host_value(other), norm);
    return {.host = host};
  }

 private:
  static c10::Scalar order(Norm norm) { return norm == Norm::two ? 2.0 : std::numeric_limits<double>::infinity(); }
  static double joint(double one, double other, Norm norm) {
    if (norm == Norm::two) return std::hypot(one, other);
    return std::isnan(one) || one > other ? one : other;
  }
  static at::Tensor measured(at::TensorList list, Norm norm) {
    const at::ScalarType dtype = list[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    return at::linalg_vector_norm(at::stack(at::_foreach_norm(list, order(norm), dtype)), order(norm));
  }

  // Where an accelerator is.
  at::Tensor on_device(double host, Norm norm) {
    const auto accelerated = std::ranges::find_if(others_, [](const at::Tensor& other) { return !other.is_cpu(); });
    const at::Device home = accelerated->device();
    if (host != 0) others_.push_back(at::scalar_tensor(host, at::TensorOptions().dtype(at::kFloat)));
    if (others_.size() == 1) return others_[0];
    for (at::Tensor& other : others_) other = other.to(home, at::kFloat, /*non_blocking=*/true);
    return at::linalg_vector_norm(at::stack(others_), order(norm));
  }

  template <class Value>
  double read(Rows<const Value, 1>& rows, const std::vector<at::Tensor>& list, Norm norm) {
    rows.clear();
    for (const at::Tensor& gradient : list)
      if (gradient.is_non_overlapping_and_dense())
        rows.add({gradient.template const_data_ptr<Value>()}, gradient.numel());
      else others_.push_back(measured(gradient, norm));
    found_.fill(0);
    rows.each([&](std::int64_t part, const auto& at, std::int64_t count) {
      double& found = found_[static_cast<std::size_t>(part)];
      if (norm == Norm::two) found += sum_of_squares(at[0], count);
      else found = joint(found, static_cast<double>(largest_magnitude(at[0], count)), norm);
    });
    double all = 0;
    for (const double found : found_) all = norm == Norm::two ? all + found : joint(all, found, norm);
    if (norm == Norm::largest) return all;
    return std::isfinite(all) ? std::sqrt(all) : exact(rows);
  }

  // Squares overflowed, or a gradient is not finite.
  template <class Value>
  double exact(Rows<const Value, 1>& rows) {
    std::array<long double, Rows<const Value, 1>::most> found{};
    rows.each([&](std::int64_t part, const auto& at, std::int64_t count) {
      found[static_cast<std::size_t>(part)] += exact_sum_of_squares(at[0], count);
    });
    return static_cast<double>(std::sqrt(std::accumulate(found.begin(), found.end(), 0.0L)));
  }

  Rows<const float, 1> floats_;
  Rows<const double, 1> doubles_;
  std::array<double, Rows<const float, 1>::most> found_{};
  std::vector<at::Tensor> others_;
};

}  // namespace frugal::inline v0::detail
