#pragma once

#include <frugal/detail/signal_owners.hpp>
#include <frugal/policy.hpp>

#include <atomic>
#include <csignal>
#include <memory>
#include <stdexcept>
#include <vector>

namespace frugal::inline v0 {

struct PreemptionOptions {
  std::vector<int> signals = {SIGTERM, SIGINT};  ///< none switches it off; on SLURM add SIGUSR1 (`--signal=USR1@120`)
};

/// Asks to stop when a signal arrives: a spot reclaim, `scancel`, Ctrl-C. The Trainer looks after every micro-batch and
/// every validation, saves, and returns StopReason::preempted, whose exit code 75 means "requeue me".
///
///     Preemption preemption;        // early in main: what arrives during the set-up is heard too; move it into a Trainer
///     for (auto& batch : batches) { train(batch); if (preemption.requested()) { save(); return 75; } }
///
/// The handler only sets flags. A Preemption hears its own signals and no others, from when it was made; the second one that
/// any living Preemption hears ends the process at once, as if nobody handled it. Signal handlers belong to the process: they are installed by the first Preemption that
/// names a signal and the previous one comes back with the last, in whatever order they go. A handler that somebody
/// installs in between is left alone.
class Preemption {
 public:
  static constexpr Role role = Role::interruption;

  /// Installs the handlers. Throws std::invalid_argument, and installs none, on a signal that cannot be handled.
  explicit Preemption(PreemptionOptions options = {})
      : owned_(options.signals), asked_(std::make_unique<std::atomic<bool>>(false)) {}

  /// True from the first signal, or request(), on. Two atomic reads; safe from any thread. These three
  /// throw std::logic_error on a Preemption that was moved from.
  bool requested() const { return asked().load(std::memory_order_relaxed) || owned_.arrived(); }

  /// Asks to stop without a signal, from any thread: for a reclaim notice that you poll.
  void request() { asked().store(true, std::memory_order_relaxed); }

  /// Forgets a request, and what this Preemption heard: its next signal is a first one again. What others heard, they keep.
  void reset() { asked().store(false), owned_.forget(); }

 private:
  // One that was moved from hears nothing any more, and what is asked of it nobody hears.
  std::atomic<bool>& asked() const {
    if (!asked_)
      throw std::logic_error(
          "Preemption: this one was moved from. Use the one that it was moved to: trainer.get<Preemption>().");
    return *asked_;
  }

  detail::OwnedSignals owned_;
  std::unique_ptr<std::atomic<bool>> asked_;  // on the heap: a Trainer moves its policies while others may hold this
};

}  // namespace frugal::inline v0
