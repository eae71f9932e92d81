#pragma once

#include <frugal/policy.hpp>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

// Where a run stands inside an epoch, and what it takes to get back there: the position means something only in the same
// order of the same samples.
namespace frugal::inline v0::detail {

// A checkpointing policy without `RandomState` leaves random numbers alone.
struct NoRandomState {
  static NoRandomState now() { return {}; }
  void restore() const {}
  static void save(auto&) {}
  static void load(auto&) {}
};
template <class Checkpointing>
struct RandomStateOf {
  using type = NoRandomState;
};
template <class Checkpointing>
  requires requires { typename Checkpointing::RandomState; }
struct RandomStateOf<Checkpointing> {
  using type = typename Checkpointing::RandomState;
};

// Batches that know on what a position in them depends.
template <class Source>
concept Fingerprinted = requires(const Source& batches) {
  std::string(batches.fingerprint());
  std::int64_t{batches.steps()};  // micro-batches of an effective batch
  std::int64_t{batches.size()};   // micro-batches of an epoch
};

template <class Random>
class Place {
 public:
  // A new epoch of these batches begins.
  void enter(const auto& batches, bool pending) {
    note(batches);
    window_begin_ = pending ? before_the_epoch : 0;
    at_epoch_start_ = Random::now();
  }
  // A window ended here.
  void close(const Progress& at) {
    window_begin_ = at.micro_batch, window_samples_ = at.samples;
    open_ = false;
  }

  // The epoch goes on with these batches. With other micro-batches the gradients of an unfinished window are of no use:
  // moves back to its first sample and says so by true.
  template <class Source>
  bool reenter(const Source& batches, Progress& at, bool pending) {
    bool moved_back = false;
    if constexpr (Fingerprinted<Source>) {
      if (const std::string order = batches.fingerprint(); !order_.empty() && order != order_)
        throw std::invalid_argument("Trainer: the run stands inside an epoch of other batches (" + order_ + "; now " +
                                    order + "). Use the same data, seed and batch_size until the epoch ends.");
      const bool other_cut = batches.steps() != steps_ || batches.size() != size_;
      if (steps_ > 0 && other_cut) moved_back = cut_anew(batches, at);
    }
    if (open_ && !pending && !moved_back)
      throw std::invalid_argument(
          "Trainer: the checkpoint lies inside a window that this accumulator cannot continue. Use "
          "the same GradAccumulator until the window ends.");
    note(batches);
    return moved_back;
  }

  const Random& at_epoch_start() const { return at_epoch_start_; }

  // What is drawn between a resume and the first step (a DataLoader draws when it is made) leaves no trace.
  void resumed() { at_resume_ = Random::now(); }
  void begin() { std::exchange(at_resume_, Random{}).restore(); }

  void save(auto& out, bool pending) const {
    out.write("order", order_);
    out.write("steps", steps_);
    out.write("size", size_);
    out.write("window.begin", window_begin_);
    out.write("window.samples", window_samples_);
    out.write("window.open", std::int64_t{pending});
    at_epoch_start_.save(out);
  }
  void load(auto& in) {
    std::int64_t open = 0;
    in.read("order", order_);
    in.read("steps", steps_);
    in.read("size", size_);
    in.read("window.begin", window_begin_);
    in.read("window.samples", window_samples_);
    in.read("window.open", open);
    at_epoch_start_.load(in);
    open_ = open != 0;
  }

 private:
  template <class Source>
  void note(const Source& batches) {
    open_ = false;
    if constexpr (Fingerprinted<Source>)
      order_ = batches.fingerprint(), steps_ = batches.steps(), size_ = batches.size();
    else order_.clear(), steps_ = size_ = 0;
  }
  template <class Source>
  bool cut_anew(const Source& batches, Progress& at) {
    if (window_begin_ == before_the_epoch || (window_begin_ % steps_ != 0 && window_begin_ != size_))
      throw std::invalid_argument(
          "Trainer: the window of the checkpoint does not begin with an effective batch, so it "
          "cannot be cut anew. Use the same micro_batch until the epoch ends.");
    const bool moved_back = at.micro_batch > window_begin_;
    window_begin_ = window_begin_ == size_ ? batches.size() : window_begin_ / steps_ * batches.steps();
    at.micro_batch = window_begin_;
    at.samples = window_samples_;
    return moved_back;
  }

  std::string order_;
  std::int64_t steps_ = 0, size_ = 0;                   // of the batches; 0: they do not say
  static constexpr std::int64_t before_the_epoch = -1;  // carried over from the epoch before
  std::int64_t window_begin_ = 0;                       // of the running window, in this epoch
  std::int64_t window_samples_ = 0;                     // Progress::samples there
  bool open_ = false;                                   // loaded with gradients of an unfinished window
  Random at_epoch_start_{}, at_resume_{};
};

// Without checkpoints there is nowhere to get back to.
struct NoPlace {
  static void enter(const auto&, bool) {}
  static bool reenter(const auto&, Progress&, bool) { return false; }
  static void close(const Progress&) {}
  static void begin() {}
};

}  // namespace frugal::inline v0::detail
