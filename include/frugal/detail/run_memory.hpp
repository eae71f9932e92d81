#pragma once

#include <string_view>

namespace frugal::inline v0::detail {

// What the loop itself has to remember: a checkpoint's section "trainer".
template <class LossLog, class Best, class Trained, class Place>
struct RunMemory {
  static constexpr std::string_view state_name = "trainer";
  LossLog& loss_log;
  Best& best;
  Trained& trained;
  Place& place;
  bool pending;  // there are gradients of an unfinished window

  // The metric belongs to the weights that were being trained, also while the model holds the best ones.
  void measured(const auto&, auto&& out) const { trained.measured(out, "trained"); }
  bool forward_since_check() const { return place.forward_since_check(); }
  void save(auto& out) const {
    loss_log.save(out);
    best.save(out, "best");
    trained.save(out, "trained");
    place.save(out, pending);
  }
  void load(auto& in) {
    loss_log.load(in);
    best.load(in, "best");
    trained.load(in, "trained");
    place.load(in);
  }
};
template <class LossLog, class Best, class Trained, class Place>
RunMemory(LossLog&, Best&, Trained&, Place&, bool) -> RunMemory<LossLog, Best, Trained, Place>;

}  // namespace frugal::inline v0::detail
