#pragma once

#include <frugal/detail/batch_search.hpp>
#include <frugal/detail/batch_trials.hpp>
#include <frugal/detail/model_trial.hpp>
#include <frugal/detail/open_answers.hpp>
#include <frugal/detail/out_of_memory.hpp>
#include <frugal/policy.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <type_traits>

/// Finds, before training, the largest micro-batch that fits into memory, and plans accumulation around it so that the
/// effective batch, and with it the result of training, stays exactly what was asked for.
///
///     auto sample = [&](std::int64_t n) { return batch_of(n); };                 // a batch of n samples
///     frugal::AmpPolicy<> amp(device);
///     auto plan = frugal::BatchSizeProber{}.plan(256, model, optimizer, sample, loss, amp);
///     frugal::GradAccumulator accumulator(plan.steps);                           // 256 with 85 fitting: 4 x 64
///
/// A trial is a training step as it will be: forward in the precision of the policy, backward, an optimizer step with
/// its state, then once more with that state in memory, and with the gradients of another micro-batch where the plan
/// accumulates. Afterwards model, optimizer, gradients, random generators and the policy are bit for bit what they were
/// (StateGuard; a copy of model and optimizer state in host memory). Batches should come as they will in training, in the
/// same memory order (channels_last), too.
///
/// Trials begin at 32 samples and go below only when they must, and to a single sample (which BatchNorm refuses) only
/// when two do not fit. They grow fourfold, then halve the gap. Where memory is measured, on an accelerator or by a
/// trial that returns MemoryUse, a line through the measurements takes the place of halving: three or four trials are
/// usual.
///
/// What does not fit must throw. An accelerator does; a CPU on Linux promises memory that it does not have and ends the
/// process when it is used: set `max` there. Device code not yet run on a GPU.
namespace frugal::inline v0 {

struct BatchSizeProberOptions {
  std::int64_t min = 1;      ///< no smaller batch is tried
  std::int64_t max = 65536;  ///< nor a larger one; set it to the size of the data set
  double margin = 0.05;      ///< share of memory that plan() leaves free, or of the size where memory is not measured
  int max_trials = 20;       ///< then the largest size so far is taken
};

/// `steps` micro-batches of at most `micro_batch` samples make one optimizer step on `effective` samples:
/// steps = ceil(effective / largest that fits), micro_batch = ceil(effective / steps). Split the effective batch
/// evenly, as Batches does: 256 in 7 steps is 36 or 37 samples each.
struct BatchPlan { std::int64_t micro_batch, steps, effective; };

/// The search; see the top of this header. It runs before training and is no part of a Trainer.
class BatchSizeProber {
 public:
  static constexpr Role role = Role::before_training;

  /// Throws when the options contradict each other.
  explicit BatchSizeProber(BatchSizeProberOptions options = {}) : options_(options) {
    TORCH_CHECK(options.min >= 1 && options.min <= options.max, "BatchSizeProber: min is ", options.min, " and max is ",
                options.max, ". They must be 1 <= min <= max.");
    TORCH_CHECK(options.margin >= 0 && options.margin < 1, "BatchSizeProber: margin is ", options.margin,
                ". It is a share in [0, 1).");
    TORCH_CHECK(options.max_trials >= 1, "BatchSizeProber: max_trials is ", options.max_trials, ". Allow at least 1.");
  }

  /// Plans for a trial of your own: `trial(n)` makes one full step with n samples, undoes it, and throws when n is too
  /// big; it may return MemoryUse. What fits must be monotone in n. Neither the plan nor a trial is larger than
  /// min(max, effective); the plan is never larger than a size that was tried and succeeded. Where memory is
  /// not measured there is no margin at that upper end, nor for micro-batches of one or two. Throws when not even `min`
  /// fits; any error that is not out of memory comes through.
  template <class Trial>
  BatchPlan plan(std::int64_t effective, Trial&& trial) {
    constexpr bool measured = std::is_convertible_v<decltype(trial(effective)), MemoryUse>;
    return plan_for(effective, trial, measured ? Margin::memory : Margin::size);
  }

  /// Plans for a model in full precision: `make_batch(n)` gives a batch of n samples on the model's device,
  /// `loss(model, batch)` its mean loss, or Weighted.
  template <class Model, class Optimizer, class MakeBatch, class Loss>
  BatchPlan plan(std::int64_t effective, Model& model, Optimizer& optimizer, MakeBatch&& make_batch, Loss&& loss) {
    static_assert(makes_batches<Model, MakeBatch, Loss>,
                  "BatchSizeProber: the batch maker or the loss does not fit. Write `make_batch(std::int64_t n)`, then "
                  "`loss(Model&, batch)`, in this order.");
    if constexpr (makes_batches<Model, MakeBatch, Loss>) {
      detail::expect_answered("BatchSizeProber: plan()", optimizer);
      detail::ModelTrial trial(effective, model, optimizer, make_batch, loss);
      return plan_for(effective, trial, trial.measures() ? Margin::memory : Margin::size);
    } else {
      return {};
    }
  }

  /// The same in the precision that will run: pass the policy that training will use.
  template <class Model, class Optimizer, class MakeBatch, class Loss, class Precision>
  BatchPlan plan(std::int64_t effective, Model& model, Optimizer& optimizer, MakeBatch&& make_batch, Loss&& loss,
                 Precision& precision) {
    constexpr bool fits = detail::plays<Role::precision, Precision> && PrecisionPolicy<Precision, Optimizer>;
    static_assert(fits,
                  "BatchSizeProber: the last argument must be a precision policy. Pass the AmpPolicy that training "
                  "will use.");
    static_assert(makes_batches<Model, MakeBatch, Loss>,
                  "BatchSizeProber: the batch maker or the loss does not fit. Write `make_batch(std::int64_t n)`, then "
                  "`loss(Model&, batch)`, in this order.");
    if constexpr (fits && makes_batches<Model, MakeBatch, Loss>) {
      detail::expect_answered("BatchSizeProber: plan()", optimizer);
      detail::ModelTrial trial(effective, model, optimizer, make_batch, loss);
      const auto once = [&](std::int64_t size) { return trial(size, precision); };
      return plan_for(effective, once, trial.measures() ? Margin::memory : Margin::size);
    } else {
      return {};
    }
  }

  /// The largest size in [min, max] that was tried and succeeded; exact when max_trials suffices, within two per cent
  /// where memory is measured. No margin. Throws as plan() does.
  template <class Trial>
  std::int64_t largest(Trial&& trial) {
    detail::BatchTrials trials(trial, options_.max_trials, options_.min);
    detail::BatchSearch search(options_.max - options_.min + 1, [this](std::int64_t i) { return options_.max - i; });
    search.run([&](std::int64_t size) { return trials.fits(size, 1.0); }, [&] { return trials.left(); },
               [&] { return trials.line().largest(1.0); });
    return trials.largest();
  }

  /// Whether this error means that memory ran out, on any device: std::bad_alloc, LibTorch's OutOfMemoryError, and what
  /// the CPU allocator, cuBLAS and cuDNN throw instead, known by their text.
  static bool is_out_of_memory(const std::exception& error) { return detail::is_out_of_memory(error); }

 private:
  // As they will be called: the batch is a variable.
  template <class Model, class MakeBatch, class Loss>
  static constexpr bool makes_batches = [] {
    if constexpr (std::is_invocable_v<MakeBatch&, std::int64_t>)
      return std::is_invocable_v<Loss&, Model&, std::remove_cvref_t<std::invoke_result_t<MakeBatch&, std::int64_t>>&>;
    else return false;
  }();

  enum class Margin { memory, size };

  // Only sizes that split the effective batch evenly are worth a trial, so the search is over the number of steps. A
  // margin of the size is kept by trying that much more than is planned.
  BatchPlan plan_for(std::int64_t effective, auto& trial, Margin margin) const {
    TORCH_CHECK(effective >= 1, "BatchSizeProber: the effective batch is ", effective, ". It must be at least 1.");
    const std::int64_t cap = std::min(options_.max, effective), floor = std::min(options_.min, cap);
    const std::int64_t fewest = detail::ceil_div(effective, cap), most = detail::ceil_div(effective, floor);
    const double more = margin == Margin::size ? 1 / (1 - options_.margin) : 1;
    const double share = margin == Margin::memory ? 1 - options_.margin : 1;
    const auto size_at = [&](std::int64_t i) {
      const std::int64_t planned = detail::ceil_div(effective, fewest + i);
      if (planned <= 2) return std::max(planned, floor);
      const double size =
          std::ceil(static_cast<double>(planned) * more * (1 - 1e-12));  // 95 of 100 is 0.05, rounded or not
      return size < static_cast<double>(cap) ? std::max(static_cast<std::int64_t>(size), floor) : cap;
    };
    detail::BatchTrials trials(trial, options_.max_trials, floor);
    detail::BatchSearch search(most - fewest + 1, size_at);
    std::int64_t steps =
        fewest + search.run([&](std::int64_t size) { return trials.fits(size, share); }, [&] { return trials.left(); },
                            [&] { return trials.line().largest(share); });
    if (steps > most) {  // nothing leaves the margin free: without it, the smallest
      if (!trials.any() && trials.left()) trials.fits(floor, 1.0);
      steps = detail::ceil_div(effective, trials.smallest());
    }
    return {detail::ceil_div(effective, steps), steps, effective};
  }

  BatchSizeProberOptions options_;
};

}  // namespace frugal::inline v0
