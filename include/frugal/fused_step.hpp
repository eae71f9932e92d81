#pragma once

#include <frugal/detail/fused_groups.hpp>
#include <frugal/detail/gradients.hpp>
#include <frugal/detail/open_answers.hpp>
#include <frugal/detail/pending.hpp>
#include <frugal/policy.hpp>

#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <string>

/// Steps LibTorch's optimizers through LibTorch's fused kernels: one pass over parameter, gradient and state instead of
/// one per operation. Most of what is gained on models of many small parameters comes from the step counter, which is
/// one tensor per step number here.
///
///     torch::optim::AdamW optimizer(model->parameters(), 1e-3);
///     frugal::FusedStep fused;
///     auto loss = [&] { auto guard = amp.autocast(); return loss_of(model, batch); }();
///     if (frugal::backward(loss, batch.size(), amp)) frugal::update(optimizer, amp, fused);
///     std::cerr << fused.reason() << '\n';                            // "fused kernels", or what fell back and why
///
/// | torch::optim | options |
/// |---|---|
/// | `AdamW`, `Adam` | all, amsgrad included |
/// | `SGD` | all: momentum, dampening, nesterov, weight decay; in 16 bits on a CPU from LibTorch 2.14 on |
/// | `Adagrad` | all; a group that was added later gets its state here, where torch::optim fails |
///
/// It works on the optimizer's own state and options: torch::optim's step() can take over at any time and back, options
/// may change between steps, checkpoints and learning rate schedules need not know. The numbers differ from
/// torch::optim's by rounding, about one unit in the last place per step.
///
/// Where a kernel would be wrong, torch::optim steps that group, and only that one: parameters, gradients or state that
/// are sparse, complex, of another dtype than float, double, bfloat16 or half, that differ in dtype, device or strides;
/// memory that overlaps itself or has gaps; parameters that share memory (listed twice, views); devices other than CPU
/// and CUDA. Any other optimizer, and a class derived from one of these four, is stepped by its own step().
///
/// In update() and in a Trainer, where no policy watches gradients and the clipping policy, if there is one, is GradClip, the
/// kernels also divide by the loss scale, normalise the window and clip: gradients are read once for their norm and once by
/// the step. They differ from those of passes one after the other by rounding, where a factor is no power of two.
///
/// Costs: a steady step allocates nothing besides what the kernels allocate, reads nothing back from a device and holds
/// no gradient after it. With several threads on a CPU, small tensors are dealt out to them instead of being cut up. On CUDA,
/// tensors whose strides differ in dimensions of size 1 only cost a few small allocations; on a CPU, gradients that are not
/// contiguous cost one each. Device code not yet run on a GPU.
namespace frugal::inline v0 {

/// Who steps the optimizers that FusedStep knows.
enum class Stepping { fused, plain };

struct FusedStepOptions {
  Stepping stepping = Stepping::fused;  ///< plain switches it off: torch::optim steps everything
};

/// The policy in the role update; see the top of this header. Movable; one may serve several optimizers.
class FusedStep {
 public:
  static constexpr Role role = Role::update;

  explicit FusedStep(FusedStepOptions options = {}) : options_(options) {}

  /// Makes one step with the gradients that are there, as optimizer.step() does; parameters without a gradient are left
  /// alone, their counters too. Call it where you would call optimizer.step(); update() and the Trainer do, and only
  /// when the step is not skipped. An optimizer that needs a closure (LBFGS) does not compile.
  template <class Optimizer>
  void step(Optimizer& optimizer) {
    run(optimizer, detail::PendingScale());
  }
  /// The same with gradients that must still be multiplied, which the kernels do on the way; what update() and the Trainer
  /// call when nobody looks at gradients. Afterwards they are multiplied.
  template <std::derived_from<torch::optim::Optimizer> Optimizer>
    requires requires(Optimizer& steps) { steps.step(); }
  void step(Optimizer& optimizer, const detail::PendingScale& pending) {
    run(optimizer, pending);
  }

  /// For settle(): whether the last step of this optimizer was made here with a PendingScale::skip and is not concluded;
  /// what it was: a step, or none, and then its counts are taken back.
  bool is_late(torch::optim::Optimizer& optimizer) { return groups_.is_late(optimizer); }
  void conclude(torch::optim::Optimizer& optimizer, bool applied) { groups_.conclude(optimizer, applied); }

  /// How the last step was made, in one sentence: "fused kernels", or who fell back and why. Groups count from 0.
  std::string reason() const {
    if (whole_) return whole_;
    std::string text;
    for (std::size_t i = 0; i < groups_.refusals().size(); ++i)
      if (const char* why = groups_.refusals()[i])
        text += (text.empty() ? "torch::optim for group " : "; group ") + std::to_string(i) + ": " + why;
    return text.empty() ? "fused kernels" : text;
  }

 private:
  template <class Optimizer>
  void run(Optimizer& optimizer, const detail::PendingScale& pending) {
    constexpr bool steps_alone = requires { optimizer.step(); };
    static_assert(steps_alone,
                  "FusedStep: an optimizer that needs a closure (LBFGS) has no fused kernel. Call its "
                  "step(closure) yourself, or use AdamW.");
    constexpr bool known = std::derived_from<Optimizer, torch::optim::Optimizer> && steps_alone;
    whole_ = options_.stepping == Stepping::plain
                 ? "torch::optim for all groups: switched off"
                 : "torch::optim for all groups: the class of this optimizer has no fused kernel";
    if constexpr (known) {
      if (pending.skip.defined()) groups_.begin_late(optimizer);
      else detail::expect_answered("FusedStep: step()", optimizer);
      if (options_.stepping == Stepping::fused && groups_.step(optimizer, pending)) {
        whole_ = nullptr;
        return;
      }
      if (pending.skips()) return;
      pending.settle(optimizer, gradients_);
    }
    if constexpr (steps_alone) optimizer.step();
  }

  FusedStepOptions options_;
  detail::FusedGroups groups_;
  detail::Gradients gradients_;
  const char* whole_ = "no step yet";  // why torch::optim steps everything
};

}  // namespace frugal::inline v0
