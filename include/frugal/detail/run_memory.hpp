#pragma once

#include <cstdint>
#include <string_view>

namespace frugal::inline v0::detail {

// What fit() knows of the running epoch. `outside`: no fit() entered it, the micro-batches in it were stepped on by hand.
// `through`: its batches are consumed, and its end is due.
enum class EpochStage : char { outside, entered, through };

// What the loop itself has to remember: a checkpoint's section "trainer".
template <class LossLog, class Best, class Trained, class Place>
struct RunMemory {
  static constexpr std::string_view state_name = "trainer";
  LossLog& loss_log;
  Best& best;
  Trained& trained;
  Place& place;
  EpochStage& stage;
  bool pending;  // there are gradients of an unfinished window

  // The metric belongs to the weights that were being trained, also while the model holds the best ones.
  void measured(const auto&, auto&& out) const { trained.measured(out, "trained"); }
  bool forward_since_check() const { return place.forward_since_check(); }
  void save(auto& out) const {
    loss_log.save(out);
    best.save(out, "best");
    trained.save(out, "trained");
    place.save(out, pending);
    // not with a window open: whether it can be continued is asked where the epoch is entered again
    out.write("epoch.through", std::int64_t{stage == EpochStage::through && !pending});
  }
  void load(auto& in) {
    loss_log.load(in);
    best.load(in, "best");
    trained.load(in, "trained");
    place.load(in);
    std::int64_t through = 0;
    in.read("epoch.through", through);
    stage = through != 0 ? EpochStage::through : EpochStage::entered;
  }
};
template <class LossLog, class Best, class Trained, class Place>
RunMemory(LossLog&, Best&, Trained&, Place&, EpochStage&, bool) -> RunMemory<LossLog, Best, Trained, Place>;

}  // namespace frugal::inline v0::detail
