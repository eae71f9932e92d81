#pragma once

#include <frugal/detail/cast_node.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// Casts of weights to a lower precision, each with its node in the autograd graph, which may be walked once for every
// micro-batch of a window. Holds the casts (half the size of the weights) from their first use until clear().
//
// A cast is used again only while its weight is the same tensor in the same memory at the same version: LibTorch counts
// what is written through tensors. Who writes past it (memcpy) says so to weights_changed(). An optimizer of LibTorch's that
// is stepped by hand may write through `.data()`, which is not counted: it is found out by gradients that are gone, and on a CPU
// by a sample of the weight.
class CastCache {
 public:
  // Called after weights changed, anywhere in the process.
  static void weights_changed() { epoch().fetch_add(1, std::memory_order_relaxed); }

  // Whether it may be kept: what LibTorch's own cache takes, but for a weight of a layer alone.
  static bool takes(const at::Tensor& weight) {
    return weight.defined() && weight.scalar_type() == at::kFloat && weight.requires_grad() && weight.is_leaf() &&
           !weight.is_view();
  }

  // A region begins. Without gradients there is no window that it goes on with. A weight that only its entry and its cast's
  // graph (AccumulateGrad) hold is gone with its model.
  void begin_region() {
    const auto is_gone = [](const Entry& entry) { return entry.weight.use_count() <= 2; };
    if (std::erase_if(entries_, is_gone) > 0) next_ = 0;
    const auto in_a_window = [](const Entry& entry) { return entry.weight.unsafeGetTensorImpl()->grad().defined(); };
    if (!entries_.empty() && std::ranges::none_of(entries_, in_a_window)) clear();
  }

  // The cast of `weight`, which takes() says yes to, and whether it was here. Valid until the next call. Gradient
  // recording must be on: a cast without a graph would leave the weight without a gradient.
  std::pair<const at::Tensor&, bool> cast(const at::Tensor& weight, at::ScalarType dtype) {
    drop_if_changed();
    Entry& entry = entry_of(weight);
    const bool fresh = entry.cast.defined() && entry.cast.scalar_type() == dtype &&
                       entry.version == weight._version() && entry.memory == weight.const_data_ptr() &&
                       entry.sample == sample_of(weight);
    if (!fresh)
      entry = {weight, recorded_cast(weight, dtype), weight._version(), weight.const_data_ptr(), sample_of(weight)};
    return {entry.cast, fresh};
  }

  // Releases everything; keeps the room.
  void clear() {
    entries_.clear();
    next_ = 0;
  }

 private:
  using Sample = std::array<std::uint32_t, 16>;
  struct Entry {
    at::Tensor weight, cast;  // the cast's graph holds the weight anyway
    std::int64_t version = 0;
    const void* memory = nullptr;
    Sample sample = {};
  };

  // The bits of some of its values, in memory order.
  static Sample sample_of(const at::Tensor& weight) {
    Sample sample{};
    if (!weight.is_cpu() || !weight.is_non_overlapping_and_dense() || weight.numel() == 0) return sample;
    const auto* const at = static_cast<const float*>(weight.const_data_ptr());
    const std::int64_t last = weight.numel() - 1, parts = std::ssize(sample) - 1;
    for (std::int64_t i = 0; i <= parts; ++i)  // not in even steps, which may all fall into one column
      sample[static_cast<std::size_t>(i)] =
          std::bit_cast<std::uint32_t>(at[std::max<std::int64_t>(0, last * i / parts - i)]);
    return sample;
  }

  static std::atomic<std::uint64_t>& epoch() {
    static std::atomic<std::uint64_t> count{0};
    return count;
  }
  void drop_if_changed() {
    if (const auto now = epoch().load(std::memory_order_relaxed); std::exchange(seen_, now) != now) clear();
  }

  // Weights are used in the same order in every forward pass, so the next one is nearly always the right one.
  Entry& entry_of(const at::Tensor& weight) {
    const auto is_it = [&](const Entry& entry) { return entry.weight.is_same(weight); };
    if (next_ < entries_.size() && is_it(entries_[next_])) return entries_[next_++];
    auto found = std::ranges::find_if(entries_, is_it);
    if (found == entries_.end()) found = entries_.insert(found, Entry{weight, {}});
    next_ = static_cast<std::size_t>(found - entries_.begin()) + 1;
    if (next_ == entries_.size()) next_ = 0;
    return *found;
  }

  std::vector<Entry> entries_;
  std::size_t next_ = 0;
  std::uint64_t seen_ = epoch().load(std::memory_order_relaxed);
};

}  // namespace frugal::inline v0::detail
