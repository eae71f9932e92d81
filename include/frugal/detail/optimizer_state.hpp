#pragma once

#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <concepts>
#include <memory>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

// The options and the state of LibTorch's optimizers by name. LibTorch has no generic way: serialize() goes through an
// archive that is keyed by addresses. So there is one list per class, used in both directions.
namespace frugal::inline v0::detail {

template <class Type, class... Of>
concept AnyOf = (std::same_as<std::remove_const_t<Type>, Of> || ...);

// visit(name, value): values are double and bool.
void each_option(AnyOf<torch::optim::AdamOptions, torch::optim::AdamWOptions> auto& options, auto&& visit) {
  visit("lr", options.lr());
  visit("beta1", std::get<0>(options.betas()));
  visit("beta2", std::get<1>(options.betas()));
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("amsgrad", options.amsgrad());
}
void each_option(AnyOf<torch::optim::SGDOptions> auto& options, auto&& visit) {
  visit("lr", options.lr());
  visit("momentum", options.momentum());
  visit("dampening", options.dampening());
  visit("weight_decay", options.weight_decay());
  visit("nesterov", options.nesterov());
}
void each_option(AnyOf<torch::optim::AdagradOptions> auto& options, auto&& visit) {
  visit("lr", options.lr());
  visit("lr_decay", options.lr_decay());
  visit("weight_decay", options.weight_decay());
  visit("initial_accumulator_value", options.initial_accumulator_value());
  visit("eps", options.eps());
}
void each_option(AnyOf<torch::optim::RMSpropOptions> auto& options, auto&& visit) {
  visit("lr", options.lr());
  visit("alpha", options.alpha());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("momentum", options.momentum());
  visit("centered", options.centered());
}

// visit(name, value): values are std::int64_t, and tensors shaped like the parameter, undefined where not in use.
void each_value(AnyOf<torch::optim::AdamParamState, torch::optim::AdamWParamState> auto& state, auto&& visit) {
  visit("step", state.step());
  visit("exp_avg", state.exp_avg());
  visit("exp_avg_sq", state.exp_avg_sq());
  visit("max_exp_avg_sq", state.max_exp_avg_sq());
}
void each_value(AnyOf<torch::optim::SGDParamState> auto& state, auto&& visit) {
  visit("momentum_buffer", state.momentum_buffer());
}
void each_value(AnyOf<torch::optim::AdagradParamState> auto& state, auto&& visit) {
  visit("step", state.step());
  visit("sum", state.sum());
}
void each_value(AnyOf<torch::optim::RMSpropParamState> auto& state, auto&& visit) {
  visit("step", state.step());
  visit("square_avg", state.square_avg());
  visit("momentum_buffer", state.momentum_buffer());
  visit("grad_avg", state.grad_avg());
}

// A class of optimizers: its name and the classes of its options and state.
template <class OptionsClass, class StateClass>
struct OptimizerClass {
  using Options = OptionsClass;
  using State = StateClass;
  std::string_view name;

  static bool has(const torch::optim::OptimizerOptions& options) { return typeid(options) == typeid(Options); }
  // Throws when the group's options are of another class.
  static auto& options(auto& group) {
    using Plain = std::remove_const_t<std::remove_reference_t<decltype(group)>>;
    static_assert(std::same_as<Plain, torch::optim::OptimizerParamGroup>);
    TORCH_CHECK(has(group.options()),
                "frugal: a group's options are not of its optimizer's class. Build groups with the "
                "options class of their optimizer.");
    if constexpr (std::is_const_v<std::remove_reference_t<decltype(group)>>)
      return static_cast<const Options&>(group.options());
    else return static_cast<Options&>(group.options());
  }
  // The state of a parameter; null as long as it has none: it is created by the first step.
  static const State* state(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end() || !found->second) return nullptr;
    const auto* state = dynamic_cast<const State*>(found->second.get());
    TORCH_CHECK(state,
                "frugal: an optimizer has LibTorch's options, but a state of its own. Give it save(out) and load(in).");
    return state;
  }
};

// Calls call(OptimizerClass) for the class of the optimizer, by the dynamic type of its default options: the static type
// may be a base class. Throws for a class that is not in the list.
decltype(auto) with_class_of(const torch::optim::Optimizer& optimizer, auto&& call) {
  using namespace torch::optim;
  const OptimizerOptions& options = optimizer.defaults();
  constexpr OptimizerClass<AdamWOptions, AdamWParamState> adamw{"AdamW"};
  constexpr OptimizerClass<AdamOptions, AdamParamState> adam{"Adam"};
  constexpr OptimizerClass<SGDOptions, SGDParamState> sgd{"SGD"};
  constexpr OptimizerClass<AdagradOptions, AdagradParamState> adagrad{"Adagrad"};
  constexpr OptimizerClass<RMSpropOptions, RMSpropParamState> rmsprop{"RMSprop"};
  if (adamw.has(options)) return call(adamw);
  if (adam.has(options)) return call(adam);
  if (sgd.has(options)) return call(sgd);
  if (adagrad.has(options)) return call(adagrad);
  TORCH_CHECK(rmsprop.has(options),
              "frugal: the state of this optimizer cannot be saved. Use AdamW, Adam, SGD, Adagrad or "
              "RMSprop, or give yours save(out) and load(in).");
  return call(rmsprop);
}

}  // namespace frugal::inline v0::detail
