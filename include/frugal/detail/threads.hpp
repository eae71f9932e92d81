#pragma once

#include <ATen/ops/empty.h>
#include <ATen/TensorIterator.h>

#include <cstdint>
#include <memory>

namespace frugal::inline v0::detail {

// LibTorch's own threads. at::parallel_for is serial in a translation unit that is compiled without OpenMP, as most are;
// the loop of an iterator is compiled in LibTorch and calls back.
class Threads {
 public:
  Threads() = default;
  Threads(const Threads&) noexcept {}  // every copy makes its own
  Threads& operator=(const Threads&) noexcept { return *this; }
  Threads(Threads&&) noexcept = default;
  Threads& operator=(Threads&&) noexcept = default;
  ~Threads() = default;

  // Calls work(i) for every i in [0, parts), side by side where there are threads. It finds no thread-local state of the
  // caller there: no guard of it holds.
  void each(std::int64_t parts, const auto& work) {
    if (!parts_ || parts_->numel() != parts) {
      const auto bytes = at::empty({parts}, at::TensorOptions().device(at::kCPU).dtype(at::kByte));
      auto config = at::TensorIteratorConfig();
      config.check_all_same_dtype(false).resize_outputs(false).add_owned_output(bytes);
      parts_ = std::make_unique<at::TensorIterator>(config.build());
    }
    const auto* const first = static_cast<const char*>(parts_->data_ptr(0));
    const auto some = [&](char** data, const std::int64_t*, std::int64_t count, std::int64_t) {
      for (std::int64_t i = 0; i < count; ++i) work(data[0] - first + i);  // one byte a part
    };
    parts_->for_each(some, /*grain_size=*/1);
  }

 private:
  std::unique_ptr<at::TensorIterator> parts_;
};

}  // namespace frugal::inline v0::detail
