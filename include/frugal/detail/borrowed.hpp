#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// A list of tensors for one call that owns none of them: nothing is counted, which is most of what a list costs. What is in
// it must live until it is cleared.
class Borrowed {
 public:
  Borrowed() = default;
  Borrowed(const Borrowed&) noexcept {}  // a copy is of use to nobody
  Borrowed& operator=(const Borrowed&) noexcept { return clear(), *this; }
  Borrowed(Borrowed&&) noexcept = default;
  Borrowed& operator=(Borrowed&& other) noexcept {
    clear();
    tensors_ = std::move(other.tensors_);
    return *this;
  }
  ~Borrowed() { clear(); }

  void push_back(const at::Tensor& tensor) {
    using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    tensors_.emplace_back(Pointer::reclaim(tensor.unsafeGetTensorImpl()));
  }
  void clear() noexcept {
    for (at::Tensor& tensor : tensors_) tensor.unsafeReleaseTensorImpl();
    tensors_.clear();
  }
  at::TensorList list() const { return tensors_; }
  bool empty() const { return tensors_.empty(); }
  std::size_t size() const { return tensors_.size(); }

 private:
  std::vector<at::Tensor> tensors_;
};

}  // namespace frugal::inline v0::detail
