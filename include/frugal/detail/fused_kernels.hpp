#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/version.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>

// LibTorch's fused kernels, one description per optimizer class.
namespace frugal::inline v0::detail {

// What a kernel walks side by side, what it divides the gradients by, which it writes back then, and the flag that has it do
// nothing.
struct FusedLists {
  at::TensorList parameters, gradients;
  std::array<at::TensorList, 3> state;
  at::TensorList steps;
  std::optional<at::Tensor> divisor, skip;

  FusedLists slice(std::size_t first, std::size_t count) const {
    const auto part = [&](at::TensorList list) { return list.empty() ? list : list.slice(first, count); };
    return {part(parameters), part(gradients), {part(state[0]), part(state[1]), part(state[2])},
            part(steps),      divisor,         skip};
  }
};

// The part of a description that those share whose state has the number of its steps; they take everything.
struct StepCounted {
  static const char* refusal(const auto&, const at::Tensor&) { return nullptr; }
  static bool keeps_state(const auto&) { return true; }
  static std::int64_t due(const auto&, const auto* state) { return state ? state->step() + 1 : 1; }
  static void advance(auto& state) { state.step(state.step() + 1); }
  static void uncount(auto& state, std::int64_t due) {
    if (state.step() == due) state.step(due - 1);
  }
};

// What a description says: the classes of options and state; what the kernel cannot take; whether anything is
// kept about a parameter; the number of the step that is due, which the kernel must be told, and how it is counted and
// uncounted (false: the state did not exist before); the state tensors that it walks, and their first values; the call itself.
template <class Optimizer>
struct FusedKernel : StepCounted {  // Adam and AdamW
  static constexpr bool decoupled = std::is_same_v<Optimizer, torch::optim::AdamW>;
  static_assert(decoupled || std::is_same_v<Optimizer, torch::optim::Adam>);
  using Options = std::conditional_t<decoupled, torch::optim::AdamWOptions, torch::optim::AdamOptions>;
  using State = std::conditional_t<decoupled, torch::optim::AdamWParamState, torch::optim::AdamParamState>;

  static void each(const Options& options, auto& state, auto&& visit) {
    visit(state.exp_avg());
    visit(state.exp_avg_sq());
    if (options.amsgrad()) visit(state.max_exp_avg_sq());
  }
  static at::Tensor first(const Options&, const at::Tensor& parameter) { return at::zeros_like(parameter); }
  static bool take_back(State& state, std::int64_t due) {
    uncount(state, due);
    return state.step() != 0;
  }
  static void call(const Options& o, std::int64_t, const FusedLists& l) {
    const auto [beta1, beta2] = o.betas();
    const auto with = [&](auto kernel) {
      kernel(l.parameters, l.gradients, l.state[0], l.state[1], l.state[2], l.steps, o.lr(), beta1, beta2,
             o.weight_decay(), o.eps(), o.amsgrad(), /*maximize=*/false, l.divisor, l.skip);
    };
    if constexpr (decoupled) with([](auto&&... all) { at::_fused_adamw_(all...); });
    else with([](auto&&... all) { at::_fused_adam_(all...); });
  }
};

template <>
struct FusedKernel<torch::optim::SGD> {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;

  // Before LibTorch 2.14 the vectorised part of the CPU's kernel for bfloat16 and half never writes the parameter.
  static constexpr bool wrong_in_16_bits = TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14;
  static const char* refusal(const Options& options, const at::Tensor& parameter) {
    if (options.momentum() < 0) return "its momentum is negative";
    if (wrong_in_16_bits && parameter.is_cpu() && parameter.element_size() == 2)
      return "LibTorch's SGD kernel for 16 bits on a CPU is wrong";
    return nullptr;
  }
  static bool keeps_state(const Options& options) { return options.momentum() != 0; }
  // There is no counter: 0 means that the momentum is written for the first time, without dampening.
  static std::int64_t due(const Options& options, const State* state) {
    return !keeps_state(options) || (state && state->momentum_buffer().defined()) ? 1 : 0;
  }
  static void advance(State&) {}
  static bool take_back(State&, std::int64_t due) { return due != 0; }
  static void each(const Options& options, auto& state, auto&& visit) {
    if (keeps_state(options)) visit(state.momentum_buffer());
  }
  static at::Tensor first(const Options&, const at::Tensor& parameter) { return at::zeros_like(parameter); }
  static void call(const Options& o, std::int64_t step, const FusedLists& l) {
    at::_fused_sgd_(l.parameters, l.gradients, l.state[0], o.weight_decay(), o.momentum(), o.lr(), o.dampening(),
                    o.nesterov() && keeps_state(o), /*maximize=*/false, /*is_first_step=*/step == 0, l.divisor, l.skip);
  }
};

template <>
struct FusedKernel<torch::optim::Adagrad> : StepCounted {
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;

  static bool take_back(State& state, std::int64_t due) {
    uncount(state, due);
    return true;  // torch::optim makes it with the optimizer
  }
  static void each(const Options&, auto& state, auto&& visit) { visit(state.sum()); }
  static at::Tensor first(const Options& options, const at::Tensor& parameter) {
    return at::full_like(parameter, options.initial_accumulator_value());
  }
  static void call(const Options& o, std::int64_t, const FusedLists& l) {
    at::_fused_adagrad_(l.parameters, l.gradients, l.state[0], l.steps, o.lr(), o.lr_decay(), o.weight_decay(), o.eps(),
                        /*maximize=*/false, l.divisor, l.skip);
  }
};

}  // namespace frugal::inline v0::detail
