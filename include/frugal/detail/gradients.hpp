#pragma once

#include <frugal/detail/groups.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// The gradients of an optimizer as lists for foreach kernels, which want one device and one dtype per call. The lists
// are kept between steps, so a steady step allocates nothing; the tensors in them are not, so zero_grad frees its
// memory.
class Gradients {
 public:
  // Calls use(list) for every (device, dtype), with gradient recording off. In the lists: the values of a sparse
  // gradient (coalesced: a sum of duplicates may overflow although no part does), the real view of a complex one; no
  // empty ones. A gradient that waits to be conjugated or negated is so first: these kernels do not write into it.
  void each_kind(auto& optimizer, auto&& use) {
    const c10::NoGradGuard off;
    const Emptied emptied{kinds_};
    seen_.clear();
    for (auto&& group : groups_of(optimizer))
      for (const at::Tensor& parameter : group.params()) add(parameter);
    for (auto& kind : kinds_)
      if (!kind.empty()) use(kind);
  }

 private:
  struct Emptied {
    std::vector<std::vector<at::Tensor>>& kinds;
    ~Emptied() {
      for (auto& kind : kinds) kind.clear();
    }
  };

  void add(const at::Tensor& parameter) {
    at::Tensor gradient = parameter.grad();
    if (!gradient.defined() || !first_time(parameter)) return;
    if (gradient.layout() == at::kSparse) {
      if (is_lazy(gradient._values())) parameter.mutable_grad() = gradient = with_values_resolved(gradient);
      if (!gradient.is_coalesced()) parameter.mutable_grad() = gradient = gradient.coalesce();
      gradient = gradient._values();
    } else if (is_lazy(gradient)) {
      parameter.mutable_grad() = gradient = resolved(gradient);
    }
    TORCH_CHECK(gradient.layout() == at::kStrided, "frugal: a gradient has layout ", gradient.layout(),
                ". Gradients must be strided or sparse (COO).");
    if (gradient.numel() == 0) return;
    if (gradient.is_complex()) gradient = at::view_as_real(gradient);
    list_for(gradient).push_back(std::move(gradient));
  }

  static bool is_lazy(const at::Tensor& gradient) { return gradient.is_conj() || gradient.is_neg(); }
  static at::Tensor resolved(const at::Tensor& gradient) { return gradient.resolve_conj().resolve_neg(); }
  static at::Tensor with_values_resolved(const at::Tensor& sparse) {
    return at::_sparse_coo_tensor_unsafe(sparse._indices(), resolved(sparse._values()), sparse.sizes(),
                                         sparse.options(), sparse.is_coalesced());
  }

  // A tied parameter that is listed twice has one gradient.
  bool first_time(const at::Tensor& parameter) {
    const void* const id = parameter.unsafeGetTensorImpl();
    const auto at = std::ranges::lower_bound(seen_, id);
    if (at != seen_.end() && *at == id) return false;
    seen_.insert(at, id);
    return true;
  }

  // Gradients of one kind come in runs, so the last list is nearly always the right one.
  std::vector<at::Tensor>& list_for(const at::Tensor& gradient) {
    const auto fits = [&](const std::vector<at::Tensor>& list) {
      return !list.empty() && list[0].scalar_type() == gradient.scalar_type() && list[0].device() == gradient.device();
    };
    if (last_ < kinds_.size() && fits(kinds_[last_])) return kinds_[last_];
    auto found = std::ranges::find_if(kinds_, fits);
    if (found == kinds_.end()) found = std::ranges::find_if(kinds_, [](const auto& list) { return list.empty(); });
    if (found == kinds_.end()) found = kinds_.emplace(found);
    last_ = static_cast<std::size_t>(found - kinds_.begin());
    return *found;
  }

  std::vector<std::vector<at::Tensor>> kinds_;
  std::vector<const void*> seen_;  // in order of address
  std::size_t last_ = 0;
};

}  // namespace frugal::inline v0::detail
