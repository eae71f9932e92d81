#pragma once

#include <frugal/detail/guarded_tensor.hpp>
#include <frugal/detail/optimizer_state.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// Calls visit(tensor) for the tensors in a parameter's optimizer state. False: the class is not known.
bool each_state_tensor(const torch::optim::OptimizerParamState& state, auto&& visit) {
  namespace optim = torch::optim;
  const auto defined = [&](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
  };
  const auto values = [&]<class State>(std::type_identity<State>) {
    const auto* known = dynamic_cast<const State*>(&state);
    if (known)
      each_value(*known, [&](const char*, const auto& value) {
        if constexpr (std::is_same_v<decltype(value), const at::Tensor&>) defined(value);
      });
    return known != nullptr;
  };
  if (const auto* lbfgs = dynamic_cast<const optim::LBFGSParamState*>(&state)) {
    for (const at::Tensor& tensor : {lbfgs->d(), lbfgs->H_diag(), lbfgs->prev_flat_grad()}) defined(tensor);
    for (const auto* list : {&lbfgs->old_dirs(), &lbfgs->old_stps(), &lbfgs->ro()})
      for (const at::Tensor& tensor : *list) defined(tensor);
    if (lbfgs->al())
      for (const at::Tensor& tensor : *lbfgs->al()) defined(tensor);
    return true;
  }
  return values(std::type_identity<optim::AdamWParamState>{}) || values(std::type_identity<optim::AdamParamState>{}) ||
         values(std::type_identity<optim::SGDParamState>{}) || values(std::type_identity<optim::AdagradParamState>{}) ||
         values(std::type_identity<optim::RMSpropParamState>{});
}

// Writes options in place where the class is known: others may hold references to them.
template <class Options>
bool assign_options(torch::optim::OptimizerOptions& to, const torch::optim::OptimizerOptions& from) {
  if (typeid(to) != typeid(Options) || typeid(from) != typeid(Options)) return false;
  static_cast<Options&>(to) = static_cast<const Options&>(from);
  return true;
}
inline bool assign_known_options(torch::optim::OptimizerOptions& to, const torch::optim::OptimizerOptions& from) {
  namespace optim = torch::optim;
  return assign_options<optim::AdamWOptions>(to, from) || assign_options<optim::AdamOptions>(to, from) ||
         assign_options<optim::SGDOptions>(to, from) || assign_options<optim::AdagradOptions>(to, from) ||
         assign_options<optim::RMSpropOptions>(to, from) || assign_options<optim::LBFGSOptions>(to, from);
}

// The state, the groups and the options of an optimizer of LibTorch. State that is created meanwhile is removed again.
class GuardedOptimizer {
 public:
  // Throws, before anything happened, on state of a class that is not LibTorch's.
  explicit GuardedOptimizer(torch::optim::Optimizer& optimizer)
      : optimizer_(optimizer), defaults_(optimizer.defaults().clone()) {
    for (auto& group : optimizer.param_groups()) groups_.push_back({group.params(), group.options().clone()});
    for (auto& [key, state] : optimizer.state()) {
      if (!state) continue;
      State& kept =
          states_.emplace_back(State{key, state->clone(), {}});  // a shallow copy: the tensors are the live ones
      const bool known =
          each_state_tensor(*kept.shallow, [&](const at::Tensor& tensor) { kept.tensors.emplace_back(tensor); });
      TORCH_CHECK(known,
                  "StateGuard: the optimizer has state of a class that is not LibTorch's. Guard it before its first "
                  "step, or use AdamW, Adam, SGD, Adagrad, RMSprop or LBFGS.");
    }
  }

  void restore() {
    assign_known_options(optimizer_.defaults(), *defaults_);
    restore_groups(optimizer_.param_groups());
    auto& live = optimizer_.state();
    live.clear();
    for (State& state : states_) {
      live[state.key] = state.shallow->clone();
      for (GuardedTensor& tensor : state.tensors) tensor.restore([](const at::Tensor& gradient) { return gradient; });
    }
  }

 private:
  struct Group {
    std::vector<at::Tensor> parameters;
    std::unique_ptr<torch::optim::OptimizerOptions> options;
  };
  struct State {
    void* key;
    std::unique_ptr<torch::optim::OptimizerParamState> shallow;
    std::vector<GuardedTensor> tensors;
  };

  void restore_groups(std::vector<torch::optim::OptimizerParamGroup>& live) {
    while (live.size() > groups_.size()) live.pop_back();
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      const Group& kept = groups_[i];
      if (i == live.size()) live.emplace_back(kept.parameters, kept.options->clone());
      live[i].params() = kept.parameters;
      if (!assign_known_options(live[i].options(), *kept.options)) live[i].set_options(kept.options->clone());
    }
  }

  torch::optim::Optimizer& optimizer_;
  std::unique_ptr<torch::optim::OptimizerOptions> defaults_;
  std::vector<Group> groups_;
  std::vector<State> states_;
};

}  // namespace frugal::inline v0::detail
