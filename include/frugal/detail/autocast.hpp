#pragma once

#include <frugal/detail/cast_cache.hpp>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <optional>
#include <utility>

// LibTorch's own declarations of ATen/autocast_mode.h, repeated because that header costs nine seconds of compile time
// per translation unit. The test includes both: a version of LibTorch that declares them otherwise does not compile.
namespace at::autocast {
TORCH_API bool is_autocast_enabled(at::DeviceType device_type);
TORCH_API void set_autocast_enabled(at::DeviceType device_type, bool enabled);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API void set_autocast_dtype(at::DeviceType device_type, at::ScalarType dtype);
TORCH_API void clear_cache();
TORCH_API int increment_nesting();
TORCH_API int decrement_nesting();
TORCH_API bool is_autocast_cache_enabled();
TORCH_API void set_autocast_cache_enabled(bool enabled);
}  // namespace at::autocast

namespace frugal::inline v0::detail {

// After weights changed: no cast of the old ones is used again, neither LibTorch's nor ours.
inline void forget_casts() {
  CastCache::weights_changed();
  at::autocast::clear_cache();
}

// What a region of autocast does beyond LibTorch's, through the kernels of autocast_kernels.hpp.
struct AutocastExtras {
  bool attention_in_float = false;
  bool keeps_casts = false;  // of weights, from region to region
  CastCache casts = {};
  std::int64_t regions = 0;     // that were entered
  std::int64_t attentions = 0;  // calls of attention, and of layers that found their weight already cast: whether a
  std::int64_t reused = 0;      // model can gain at all
};

// Those of the innermost region of this thread.
inline thread_local AutocastExtras* running_extras = nullptr;

// Autocast to `dtype`, or none at all, for one region of one thread. Every exit restores what the entry found.
//
// LibTorch keeps the casts of weights in one cache per process and never empties it in C++. It is cleared on entry
// (casts of an outer region may be older than the last step) and on exit (so may these, at the next entry).
class [[nodiscard]] AutocastRegion {
 public:
  // `extras`, if there are any, must outlive the region.
  AutocastRegion(at::DeviceType device, std::optional<at::ScalarType> dtype, AutocastExtras* extras = nullptr)
      : device_(device),
        active_(dtype.has_value()),
        was_enabled_(at::autocast::is_autocast_enabled(device)),
        outer_(std::exchange(running_extras, extras)) {
    at::autocast::set_autocast_enabled(device, active_);
    if (extras) extras->casts.begin_region(), ++extras->regions;
    if (!active_) return;  // full precision: nothing is cast in here, so there is nothing to cache or count
    previous_dtype_ = at::autocast::get_autocast_dtype(device);
    was_caching_ = at::autocast::is_autocast_cache_enabled();
    at::autocast::clear_cache();
    at::autocast::set_autocast_dtype(device, *dtype);
    at::autocast::set_autocast_cache_enabled(true);
    at::autocast::increment_nesting();
  }
  AutocastRegion(const AutocastRegion&) = delete;
  AutocastRegion& operator=(const AutocastRegion&) = delete;
  ~AutocastRegion() {
    if (active_) {
      at::autocast::decrement_nesting();
      at::autocast::set_autocast_cache_enabled(was_caching_);
      at::autocast::set_autocast_dtype(device_, previous_dtype_);
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(device_, was_enabled_);
    running_extras = outer_;
  }

 private:
  at::DeviceType device_;
  bool active_, was_enabled_, was_caching_ = true;
  at::ScalarType previous_dtype_ = at::ScalarType::Undefined;
  AutocastExtras* outer_;
};

}  // namespace frugal::inline v0::detail
