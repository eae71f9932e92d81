#pragma once

#include <frugal/policy.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

// How fast a run goes and what is left of it, from looks at its Progress. Nothing here is counted along, so a run that
// was resumed in the middle reads like any other.
namespace frugal::inline v0::detail {

class Pace {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Of the whole run, and of one epoch; 0: unknown.
  Pace(std::int64_t epochs, std::int64_t batches_per_epoch)
      : epochs_(static_cast<double>(epochs)), batches_per_epoch_(static_cast<double>(batches_per_epoch)) {}

  // False for the first look at a run: there is nothing to compare it with.
  bool look(Time time, const Progress& at) {
    here_ = {time, at};
    if (begun_) return true;
    run_ = epoch_ = here_;
    return !(begun_ = true);
  }
  // The look before was at the end of an epoch. All epochs are as long as the ones so far.
  void end_epoch() {
    epoch_ = here_;
    if (here_.at.epoch > 0) samples_per_epoch_ = number(here_.at.samples) / number(here_.at.epoch);
  }
  // A new run over the same data.
  void reset() { begun_ = false; }

  // How much of the running epoch is done, in [0, 1]; nothing while its length is unknown.
  std::optional<double> share() const { return share_of(here_.at); }
  double epoch_seconds() const { return seconds_since(epoch_); }
  // Until the end of the run, or of the epoch where that is unknown, as fast as the run was since the first look.
  std::optional<double> seconds_left() const {
    const auto before = share_of(run_.at), now = share();
    if (!before || !now) return std::nullopt;
    const double spent = seconds_since(run_), done = number(here_.at.epoch) + *now;
    const double advance = done - number(run_.at.epoch) - *before;
    if (!(spent > 0 && advance > 0)) return std::nullopt;
    const double end = epochs_ > 0 ? epochs_ : number(here_.at.epoch) + 1;
    return std::max(0.0, end - done) * spent / advance;
  }
  // In the running epoch. Nothing when none was counted.
  std::optional<double> samples_per_second() const { return speed(here_.at.samples - epoch_.at.samples); }
  std::optional<double> steps_per_second() const { return speed(here_.at.step - epoch_.at.step); }

 private:
  struct Mark {
    Time time{};
    Progress at{};
  };
  static double number(std::int64_t count) { return static_cast<double>(count); }
  double seconds_since(const Mark& mark) const { return std::chrono::duration<double>(here_.time - mark.time).count(); }
  std::optional<double> speed(std::int64_t count) const {
    if (count <= 0 || !(epoch_seconds() > 0)) return std::nullopt;
    return number(count) / epoch_seconds();
  }
  std::optional<double> share_of(const Progress& at) const {
    if (batches_per_epoch_ > 0) return std::min(1.0, number(at.micro_batch) / batches_per_epoch_);
    if (!(samples_per_epoch_ > 0)) return std::nullopt;
    return std::clamp((number(at.samples) - number(at.epoch) * samples_per_epoch_) / samples_per_epoch_, 0.0, 1.0);
  }

  double epochs_, batches_per_epoch_;
  double samples_per_epoch_ = 0;
  bool begun_ = false;
  Mark run_, epoch_, here_;  // the first look, the start of the running epoch as far as it was seen, the last look
};

}  // namespace frugal::inline v0::detail
