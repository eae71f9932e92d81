#pragma once

#include <frugal/detail/evaluation.hpp>
#include <frugal/policy.hpp>

#include <concepts>
#include <cstdint>
#include <functional>
#include <ranges>
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

// A range that has to be drawn again is drawn in the same order only if it is a container, or if the random numbers of its
// order are known.
template <class Random, class Source>
void need_replay(const Source&) {
  constexpr bool repeats = Positioned<Source> || std::ranges::forward_range<Source&>;
  if constexpr (std::same_as<Random, NoRandomState> && !repeats)
    throw std::invalid_argument(
        "Trainer: the run stands inside an epoch, and nobody kept the random numbers that this range drew its order "
        "from. "
        "Pass a CheckpointManager (one without a directory will do), Batches or a container.");
}

// How many batches a container holds; 0: it does not say.
template <class Source>
std::int64_t size_of(const Source& batches) {
  if constexpr (std::ranges::sized_range<const Source&>) return static_cast<std::int64_t>(std::ranges::size(batches));
  else return 0;
}

// What a position counts in: the third batch of a container is not the third one of a shuffled range.
template <class Source>
constexpr const char* kind_of() {
  if constexpr (Fingerprinted<Source>) return "Batches";
  else if constexpr (Positioned<Source>) return "a source with epoch(epoch, consumed)";
  else if constexpr (std::ranges::sized_range<const Source&>) return "a container";
  else return "a range that does not know its size";
}

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
    need_replay<Random>(batches);
    if (constexpr std::string_view kind = kind_of<Source>(); !kind_.empty() && kind_ != kind)
      throw std::invalid_argument("Trainer: the run stands inside an epoch of " + kind_ + "; now it gets " +
                                  std::string(kind) + ". Use the same batches until the epoch ends.");
    bool moved_back = false;
    if constexpr (Fingerprinted<Source>) {
      if (const std::string order = batches.fingerprint(); !order_.empty() && order != order_)
        throw std::invalid_argument("Trainer: the run stands inside an epoch of other batches (" + order_ + "; now " +
                                    order + "). Use the same data, seed and batch_size until the epoch ends.");
      const bool other_cut = batches.steps() != steps_ || batches.size() != size_;
      if (steps_ > 0 && other_cut) moved_back = cut_anew(batches, at);
    } else if (size_ > 0 && size_of(batches) != size_) {
      throw std::invalid_argument("Trainer: the run stands inside an epoch of " + std::to_string(size_) +
                                  " batches; now there are " + std::to_string(size_of(batches)) +
                                  ". Use the same data and micro-batches until the epoch ends.");
    }
    if (open_ && !pending && !moved_back)
      throw std::invalid_argument(
          "Trainer: the checkpoint lies inside a window that this accumulator cannot continue. Use "
          "the same GradAccumulator until the window ends.");
    note(batches);
    return moved_back;
  }

  const Random& at_epoch_start() const { return at_epoch_start_; }

  // A forward pass moves buffers (BatchNorm), whether a step comes of it or not: from then on the metric of the last check
  // is that of other buffers.
  void forward() { forward_since_check_ = true; }
  void checked() { forward_since_check_ = false; }
  bool forward_since_check() const { return forward_since_check_; }

  // What is drawn between a resume and the first step (a DataLoader draws when it is made) leaves no trace.
  void resumed() { at_resume_ = Random::now(); }
  void begin() { std::exchange(at_resume_, Random{}).restore(); }

  void save(auto& out, bool pending) const {
    out.write("kind", kind_);
    out.write("order", order_);
    out.write("steps", steps_);
    out.write("size", size_);
    out.write("window.begin", window_begin_);
    out.write("window.samples", window_samples_);
    out.write("window.open", std::int64_t{pending});
    out.write("window.forward", std::int64_t{forward_since_check_});
    at_epoch_start_.save(out);
  }
  void load(auto& in) {
    std::int64_t open = 0, forward = 0;
    kind_.clear();
    if (in.has("kind")) in.read("kind", kind_);  // not in a checkpoint of an earlier version
    in.read("order", order_);
    in.read("steps", steps_);
    in.read("size", size_);
    in.read("window.begin", window_begin_);
    in.read("window.samples", window_samples_);
    in.read("window.open", open);
    if (in.has("window.forward")) in.read("window.forward", forward);
    at_epoch_start_.load(in);
    open_ = open != 0, forward_since_check_ = forward != 0;
  }

 private:
  template <class Source>
  void note(const Source& batches) {
    open_ = false;
    kind_ = kind_of<Source>();
    if constexpr (Fingerprinted<Source>)
      order_ = batches.fingerprint(), steps_ = batches.steps(), size_ = batches.size();
    else order_.clear(), steps_ = 0, size_ = size_of(batches);
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

  std::string kind_;  // empty: no epoch was entered yet, or the file does not say
  std::string order_;
  std::int64_t steps_ = 0, size_ = 0;  // of the batches; 0: they do not say. A container has a size only
  static constexpr std::int64_t before_the_epoch = -1;  // carried over from the epoch before
  std::int64_t window_begin_ = 0;                       // of the running window, in this epoch
  std::int64_t window_samples_ = 0;                     // Progress::samples there
  bool open_ = false;                                   // loaded with gradients of an unfinished window
  bool forward_since_check_ = false;
  Random at_epoch_start_{}, at_resume_{};
};

// Without checkpoints a run is continued in its own process only: fit() that was interrupted, or had fewer steps to do, is
// called again. Costs nothing in a step, and so little memory that it fits between the flags of the loop: what is known of
// the batches is their hash.
class NoPlace {
 public:
  void enter(const auto& batches, bool) { known_ = hash_of(batches); }
  bool reenter(const auto& batches, const Progress&, bool) {
    need_replay<NoRandomState>(batches);
    const std::uint32_t now = hash_of(batches);
    if (known_ != 0 && now != known_)
      throw std::invalid_argument(
          "Trainer: the run stands inside an epoch of other batches. Use the same data, seed, batch_size and "
          "micro_batch "
          "until the epoch ends, or call restart() for a new run.");
    known_ = now;
    return false;
  }
  static void close(const Progress&) {}
  static void begin() {}
  static void forward() {}
  static void checked() {}

 private:
  // On what a position in these batches depends, as far as they say it. Never 0.
  template <class Source>
  static std::uint32_t hash_of(const Source& batches) {
    std::string text = kind_of<Source>();
    if constexpr (Fingerprinted<Source>)
      text += batches.fingerprint() + '/' + std::to_string(batches.steps()) + '/' + std::to_string(batches.size());
    else text += std::to_string(size_of(batches));
    return static_cast<std::uint32_t>(std::hash<std::string>{}(text)) | 1U;
  }

  std::uint32_t known_ = 0;
};

}  // namespace frugal::inline v0::detail
