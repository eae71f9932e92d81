#pragma once

#include <ATen/core/Tensor.h>
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
    if (known == all_.end()) all_.push_back({&optimizer, {}, true});
    else known->counted.clear(), known->open = true;
  }
  void count(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
             const torch::optim::OptimizerParamState& state, std::int64_t due) {
    of(optimizer)->counted.push_back({parameter.unsafeGetTensorImpl(), &state, due});
  }

  // Whether that step of this optimizer was made here, and nobody has said yet what it was.
  bool is_open(const torch::optim::Optimizer& optimizer) {
    const auto known = of(optimizer);
    return known != all_.end() && known->open;
  }
  // It was a step.
  void confirm(const torch::optim::Optimizer& optimizer) { of(optimizer)->open = false; }
  // It was none. States that were loaded since keep their counts.
  template <class Kernel>
  void take_back(torch::optim::Optimizer& optimizer) {
    const auto known = of(optimizer);
    known->open = false;
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
    bool open;
  };
  std::vector<Late>::iterator of(const torch::optim::Optimizer& optimizer) {
    return std::ranges::find(all_, &optimizer, &Late::optimizer);
  }

  std::vector<Late> all_;  // one per optimizer
};

}  // namespace frugal::inline v0::detail
