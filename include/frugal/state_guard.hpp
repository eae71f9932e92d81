#pragma once

#include <frugal/detail/autocast.hpp>
#include <frugal/detail/guarded_modes.hpp>
#include <frugal/detail/guarded_optimizer.hpp>
#include <frugal/detail/guarded_tensor.hpp>
#include <frugal/detail/module.hpp>
#include <frugal/detail/open_answers.hpp>
#include <frugal/detail/random_state.hpp>
#include <frugal/detail/snapshot.hpp>
#include <frugal/policy.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <concepts>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace frugal::inline v0 {

/// Run anything, leave no trace: warm-up steps, a learning rate search, a trial of a batch size.
///
///     {
///       frugal::StateGuard guard(model, optimizer);
///       for (int i = 0; i < 10; ++i) train_one_batch(model, optimizer);
///     }                                               // as if nothing had happened, exceptions included
///
/// What comes back, bit for bit: parameters and buffers of the model and parameters of the optimizer (values, memory,
/// device and dtype, requires_grad); gradients, present or absent (they are set aside, so what runs meanwhile starts
/// without any); the optimizer's state (what is created meanwhile is removed), groups and options; the training mode of
/// every submodule; the default random generators of the CPU and of every CUDA device in use. LibTorch's cache of casts
/// is emptied. What does not: tensors and modules that are registered meanwhile, generators of your own, anything else.
///
/// Costs: a copy of parameters, buffers and optimizer state in host memory while it lives, none on a device; restore()
/// adds a copy of the gradients on their device, where there are any.
///
/// The model may be a Module, a ModuleHolder, a shared_ptr, or any struct; of a struct without parameters() the
/// parameters of the optimizer are guarded. The optimizer is one of LibTorch's, or one that has save(out) and load(in).
/// Both must outlive the guard. Guards nest.
class StateGuard {
 public:
  /// Throws, before anything changed, on optimizer state of a class that is not LibTorch's, and while nobody knows whether
  /// the last step was skipped (SkipDecision::lagged).
  template <class Model, class Optimizer>
  StateGuard(Model& model, Optimizer& optimizer) {
    detail::expect_answered("StateGuard: begun", optimizer);
    guard_model(detail::module_of(model));
    guard_optimizer(optimizer);
    random_ = detail::RandomState::now();
    for (auto& tensor : tensors_) tensor.set_gradient_aside();  // last, and it cannot fail
  }
  StateGuard(const StateGuard&) = delete;
  StateGuard& operator=(const StateGuard&) = delete;
  /// Restores. An error, which only a broken device can cause, becomes a warning.
  ~StateGuard() {
    try {
      restore_all([](const at::Tensor& gradient) { return gradient; });
    } catch (const std::exception& error) { warn(error.what()); } catch (...) {
      warn("unknown error");
    }
  }

  /// Restores now. The guard stays: its destructor restores again what happens from here on.
  void restore() {
    // copies: what runs from here on accumulates into them, not into the gradients that were set aside
    restore_all([](const at::Tensor& gradient) { return gradient.clone(); });
  }

 private:
  template <class Module>
  void guard_model(Module& module) {
    if constexpr (requires { module.parameters(); })
      for (const auto& parameter : module.parameters()) guard(parameter);
    if constexpr (requires { module.buffers(); })
      for (const auto& buffer : module.buffers()) guard(buffer);
    if constexpr (std::derived_from<Module, torch::nn::Module>) {
      modes_ = detail::GuardedModes(module);
    } else if constexpr (requires { module.train(bool{module.is_training()}); }) {
      others_.emplace_back([&module, training = bool{module.is_training()}] { module.train(training); });
    }
  }

  template <class Optimizer>
  void guard_optimizer(Optimizer& optimizer) {
    if constexpr (requires { optimizer.param_groups(); })
      for (auto& group : optimizer.param_groups())
        for (const auto& parameter : group.params()) guard(parameter);
    constexpr bool known = std::derived_from<Optimizer, torch::optim::Optimizer>;
    static_assert(known || Stateful<Optimizer>,
                  "StateGuard: the state of this optimizer is not known. Use one of LibTorch's, or write both `void "
                  "save(auto& out) const` and `void load(auto& in)`.");
    if constexpr (known) {
      optimizer_.emplace(optimizer);
    } else if constexpr (Stateful<Optimizer>) {
      detail::Snapshot snapshot;
      optimizer.save(snapshot);
      others_.emplace_back([&optimizer, snapshot = std::move(snapshot)]() mutable { optimizer.load(snapshot); });
    }
  }

  // A tensor that is listed twice is guarded once: its gradient is set aside only once.
  template <class Tensor>
  void guard(const Tensor& tensor) {
    if constexpr (std::convertible_to<const Tensor&, at::Tensor>) {
      const auto same = [&](const detail::GuardedTensor& known) { return known.live().is_same(tensor); };
      if (tensor.defined() && std::ranges::none_of(tensors_, same)) tensors_.emplace_back(tensor);
    }
  }

  // Modes first: a module may change weights or draw numbers when its mode changes.
  void restore_all(auto&& hand_over) {
    modes_.restore();
    for (auto& other : others_) other();
    if (optimizer_) optimizer_->restore();
    for (auto& tensor : tensors_) tensor.restore(hand_over);
    random_.restore();
    detail::forget_casts();  // casts of other weights
  }

  static void warn(const char* what) noexcept {
    try {
      TORCH_WARN("StateGuard: the state could not be restored: ", what);
    } catch (...) {}
  }

  detail::GuardedModes modes_;
  std::vector<std::function<void()>> others_;
  std::optional<detail::GuardedOptimizer> optimizer_;
  std::vector<detail::GuardedTensor> tensors_;
  detail::RandomState random_;
};

}  // namespace frugal::inline v0
