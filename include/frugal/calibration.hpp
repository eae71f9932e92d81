#pragma once

#include <frugal/amp_policy.hpp>
#include <frugal/detail/duels.hpp>
#include <frugal/detail/open_answers.hpp>
#include <frugal/detail/snapshot.hpp>
#include <frugal/state_guard.hpp>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

/// Finds by measuring, before training, the fastest way in which AmpPolicy can compute this model on this machine:
/// mixed precision makes many models faster, and some slower.
///
///     frugal::AmpPolicy<> amp(device);
///     auto found = frugal::calibrate(amp, model, optimizer, [&] { train_one_window(model, optimizer, amp, batch); });
///     std::cerr << found.reason << '\n';   // "bf16, attention in fp32: 1.47x as fast as fp32 [1.42x, 1.52x], ..."
///
/// In a Trainer: `if (!trainer.resume()) trainer.calibrate(batch);`. The policy's reason() says what was found, and it is in
/// the checkpoint: a resumed run computes as the interrupted one did.
///
/// Tried are full precision and the hardware's low precision (one of them alone where code or environment ask for it),
/// the latter with attention in float32 and with weights that are cast once per optimizer step (AmpOptions), where the
/// model has attention, or uses a weight more than once in a step. All take turns, so that other load on the machine
/// meets all of them, and what is clearly slower is soon left out. In the order of `Calibration::ways`, a way wins over the best one
/// so far when it is faster than that one by `margin`, in the median of the rounds that both took part in: so the simplest wins
/// unless another is faster. (The ratios that are printed are all against the first way.) What AmpOptions said of attention and
/// casts is not a limit: both are decided here.
///
/// Afterwards model, optimizer, gradients, random generators and the loss scaler are bit for bit what they were
/// (StateGuard, with its copy in host memory); only the policy's choice is new. Call it between two windows, on a batch of
/// the usual size and memory order (channels_last), and while no other thread computes. It takes `CalibrationOptions::seconds` at
/// most, but for slow steps: three rounds are made in any case.
///
/// In a loop of your own the step is a whole window: with an accumulator, as many micro-batches as it takes, and update(). One
/// that ends in mid-window leaves the accumulator there, and is not what training does. What GradClip::norm() and
/// FusedStep::reason() say afterwards is of the last trial; the Trainer uses copies of these three.
namespace frugal::inline v0 {

struct CalibrationOptions {
  double margin = 0.02;     ///< share of time that a more elaborate way must save
  std::int64_t rounds = 9;  ///< in each, every way is measured once; at least 3
  double seconds = 20;      ///< then no further round begins, but for the third
  double turn = 0.01;       ///< seconds that a measurement lasts at least; steps are repeated until it does
  std::function<std::chrono::steady_clock::time_point()> clock = {};  ///< empty: std::chrono::steady_clock::now
};

/// What calibrate() found.
struct Calibration {
  /// One way to compute. `ratio`: how much faster than the first way, the median of the rounds; `low`, `high`: the
  /// smallest and the largest.
  struct Way {
    Precision precision;
    Attention attention;
    WeightCasts weight_casts;
    double ratio, low, high;
  };
  std::vector<Way> ways;  ///< those that were measured, the simplest first
  std::size_t chosen;     ///< which of them
  std::string reason;     ///< as AmpPolicy::reason() says it
};

namespace detail {

// Puts a policy back as it was.
template <class Amp>
class GuardedAmp {
 public:
  explicit GuardedAmp(Amp& amp) : amp_(amp), choice_(amp.chosen().now()), how_(amp.chosen().how()) { amp.save(state_); }
  GuardedAmp(const GuardedAmp&) = delete;
  ~GuardedAmp() {
    amp_.reset();
    amp_.become(choice_, how_);
    amp_.load(state_);
  }

 private:
  Amp& amp_;
  PrecisionChoice choice_;
  Chosen how_;
  Snapshot state_;
};

inline void wait_for(at::Device device) {
  if (device.is_cpu()) return;
  const auto* const kind = c10::impl::getDeviceGuardImpl(device.type());
  kind->synchronizeDevice(device.has_index() ? device.index() : kind->getDevice().index());
}

inline std::string times(double ratio) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2fx", ratio);
  return text;
}

// "bf16, attention in fp32: 1.47x as fast as fp32 [1.42x, 1.52x], measured in 9 rounds; bf16 1.07x."
inline std::string reason_of(const std::vector<PrecisionChoice>& ways, const Duels& duels, std::size_t chosen) {
  std::string text = ways[chosen].text();
  if (ways.size() == 1) return text + ", all that this step has a use for.";
  if (chosen == 0) {
    text += ", the fastest";
  } else {
    const Ratio ratio = duels.ratio(chosen, 0);
    text += ": " + times(ratio.median) + " as fast as " + ways[0].text() + " [" + times(ratio.low) + ", " +
            times(ratio.high) + "]";
  }
  text += ", measured in " + std::to_string(duels.rounds(chosen)) + " rounds";
  for (std::size_t i = 1; i < ways.size(); ++i)
    if (i != chosen) text += "; " + ways[i].text() + " " + times(duels.ratio(i, 0).median);
  return text + ".";
}

}  // namespace detail

/// Measures and chooses; see the top of this header. `step()` makes one whole optimizer step as training will: every
/// forward pass of the window inside `amp.autocast()`, backward and update with `amp`. Throws on options that are out of
/// range; what `step` throws comes through. In both cases everything is as before.
template <class Tag, class Model, class Optimizer, class Step>
Calibration calibrate(AmpPolicy<Tag>& amp, Model& model, Optimizer& optimizer, Step&& step,
                      const CalibrationOptions& options = {}) {
  TORCH_CHECK(options.margin >= 0 && options.margin < 1 && options.rounds >= 3 && options.turn >= 0,
              "calibrate: margin is ", options.margin, ", rounds ", options.rounds, " and turn ", options.turn,
              ". They must be a share in [0, 1), at least 3, and not negative.");
  detail::expect_none_open("calibrate: called", amp.unanswered());
  std::vector<detail::PrecisionChoice> ways = amp.chosen().candidates();
  if (ways.size() == 1) return {{{ways[0].precision, {}, {}, 1, 1, 1}}, 0, amp.reason()};

  const auto prepare = [&](std::size_t i) { amp.become(ways[i], detail::Chosen::by_rule); };
  detail::Duels duels(options.clock, options.turn, [&] { detail::wait_for(amp.device()); });
  {
    const detail::GuardedAmp keep(amp);
    // The most elaborate way first: it says which of its parts this model has a use for. Guarded by itself: what it frees is
    // the memory that the others compute in, as training does afterwards. In a heap that has yet to grow, malloc gives memory
    // back at the end of every step, and page faults are most of what is measured.
    prepare(ways.size() - 1);
    {
      StateGuard guard(model, optimizer);
      step();
      guard.restore();  // here, where an error is seen
    }
    TORCH_CHECK(amp.extras()->regions > 0,
                "calibrate: the step never entered `amp.autocast()`, so every precision is the same. "
                "Make the forward passes inside of it.");
    const bool attends = amp.extras()->attentions > 0, reuses = amp.extras()->reused > 0;
    std::erase_if(ways, [&](const detail::PrecisionChoice& way) {
      return (!attends && way.attention == Attention::fp32) || (!reuses && way.weight_casts == WeightCasts::per_step);
    });
    prepare(0);  // nobody waits for what the last step was (SkipDecision::lagged)
    StateGuard guard(model, optimizer);
    duels.run(ways.size(), options.rounds, options.seconds, prepare, step);
    guard.restore();
  }
  const std::size_t chosen = duels.winner(options.margin);
  Calibration found{{}, chosen, detail::reason_of(ways, duels, chosen)};
  for (std::size_t i = 0; i < ways.size(); ++i) {
    const detail::Ratio ratio = duels.ratio(i, 0);
    found.ways.push_back(
        {ways[i].precision, ways[i].attention, ways[i].weight_casts, ratio.median, ratio.low, ratio.high});
  }
  ways[chosen].reason = found.reason;
  amp.become(ways[chosen], detail::Chosen::by_measuring);
  found.reason = amp.reason();
  return found;
}

}  // namespace frugal::inline v0
