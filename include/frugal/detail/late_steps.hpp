#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstdint>
#include <ranges>
#include <vector>

namespace frugal::inline v0::detail {

// What was counted in the last steps that may turn out to be none (PendingScale::skip).
class LateSteps {
 public:
  void begin(const torch::optim::Optimizer& optimizer) {
    const auto known = of(optimizer);
    if (known != all_.end()) known->counted.clear();
    else all_.push_back({&optimizer, {}});
  }
  void count(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
             const torch::optim::OptimizerParamState& state, std::int64_t due) {
    of(optimizer)->counted.push_back({parameter.unsafeGetTensorImpl(), &state, due});
  }

  // It was none. States that were loaded since keep their counts.
  template <class Kernel>
  void take_back(torch::optim::Optimizer& optimizer) {
    const auto known = of(optimizer);
    TORCH_CHECK(known != all_.end(),
                "FusedStep: the step that was skipped was made by another FusedStep. Pass the same one to settle().");
    auto& states = optimizer.state();
    for (const Counted& step : known->counted | std::views::reverse) {  // a parameter may be in two groups
      const auto found = states.find(step.parameter);
      if (found == states.end() || found->second.get() != step.state) continue;
      if (!Kernel::take_back(static_cast<typename Kernel::State&>(*found->second), step.due)) states.erase(found);
    }
  }

 private:
  struct Counted {
    void* parameter;  // its key among the states
    const torch::optim::OptimizerParamState* state;
    std::int64_t due;
  };
  struct Late {
    const torch::optim::Optimizer* optimizer;
    std::vector<Counted> counted;
  };
  std::vector<Late>::iterator of(const torch::optim::Optimizer& optimizer) {
    return std::ranges::find(all_, &optimizer, &Late::optimizer);
  }

  std::vector<Late> all_;  // one per optimizer
};

}  // namespace frugal::inline v0::detail
