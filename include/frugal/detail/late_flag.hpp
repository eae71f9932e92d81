#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <utility>

namespace frugal::inline v0::detail {

// A number that a device computes and the host wants to know later: its copy to pinned memory is queued behind the computation,
// so that reading it after more work was queued waits for none of that work. On a CPU it is there at once. Not yet run on
// a GPU.
class LateFlag {
 public:
  bool under_way() const { return flag_.defined(); }
  // Where it was computed, for work that is queued behind it.
  const at::Tensor& on_device() const { return flag_; }

  // `flag` is a float32 of no dimension that nobody writes again.
  void start(at::Tensor flag) {
    flag_ = std::move(flag);
    if (flag_.is_cpu()) return;
    if (!host_.defined()) host_ = at::empty({}, at::TensorOptions().dtype(at::kFloat).pinned_memory(true));
    host_.copy_(flag_, /*non_blocking=*/true);
    if (!copied_) copied_.emplace(flag_.device().type());
    copied_->record(c10::impl::VirtualGuardImpl(flag_.device().type()).getStream(flag_.device()));
  }
  // Waits for the copy.
  bool read() const {
    if (flag_.is_cpu()) return *flag_.const_data_ptr<float>() != 0;
    copied_->synchronize();
    return *host_.const_data_ptr<float>() != 0;
  }
  void forget() { flag_.reset(); }

 private:
  at::Tensor flag_, host_;
  std::optional<c10::Event> copied_;
};

}  // namespace frugal::inline v0::detail
