#pragma once

#include <frugal/detail/rows.hpp>
#include <frugal/detail/vectors.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_lerp.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace frugal::inline v0::detail {

// to += weight * (from - to) for tensors of one device and dtype. float and double on a CPU are walked in memory, which
// calls no operator and allocates nothing.
class Lerp {
 public:
  void operator()(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from, double weight) {
    const bool done = to.empty() ||
                      (to[0].is_cpu() && to[0].scalar_type() == at::kFloat && walk(floats_, to, from, weight)) ||
                      (to[0].is_cpu() && to[0].scalar_type() == at::kDouble && walk(doubles_, to, from, weight));
    if (!done) at::_foreach_lerp_(to, from, weight);
  }

 private:
  template <class Value>
  static bool walk(Rows<Value, 2>& rows, const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from,
                   double weight) {
    rows.clear();
    for (std::size_t i = 0; i < to.size(); ++i) {
      const bool side_by_side = to[i].is_non_overlapping_and_dense() && to[i].strides() == from[i].strides() &&
                                to[i].sizes() == from[i].sizes() && !from[i].is_neg();
      if (!side_by_side) return false;
      rows.add({to[i].template mutable_data_ptr<Value>(), const_cast<Value*>(from[i].template const_data_ptr<Value>())},
               to[i].numel());
    }
    rows.each([&](std::int64_t, const auto& at, std::int64_t count) { move_towards(at[0], at[1], count, weight); });
    return true;
  }

  Rows<float, 2> floats_;
  Rows<double, 2> doubles_;
};

}  // namespace frugal::inline v0::detail
