#pragma once

#include <frugal/detail/fused_kernels.hpp>
#include <frugal/detail/fused_layout.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// Steps optimizers group by group: through a kernel, or as torch::optim would.
class FusedGroups {
 public:
  // False, and nothing happened: the class of the optimizer is not one of the four. The dynamic type decides, since the
  // static one may be the base class; a derived class does not count, since it may step in its own way.
  bool step(torch::optim::Optimizer& optimizer) {
    namespace optim = torch::optim;
    const auto& type = typeid(optimizer);
    if (type == typeid(optim::AdamW)) step_groups<FusedKernel<optim::AdamW>>(optimizer);
    else if (type == typeid(optim::Adam)) step_groups<FusedKernel<optim::Adam>>(optimizer);
    else if (type == typeid(optim::SGD)) step_groups<FusedKernel<optim::SGD>>(optimizer);
    else if (type == typeid(optim::Adagrad)) step_groups<FusedKernel<optim::Adagrad>>(optimizer);
    else return false;
    return true;
  }
  // By group, for the last step: why torch::optim stepped it; null where a kernel did.
  const std::vector<const char*>& refusals() const { return refusals_; }

 private:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  struct Entry {
    const at::Tensor* parameter;
    torch::optim::OptimizerParamState* state;  // null before the first step
  };

  // Hides all groups but one from the optimizer: its step() is the only way to step a group as torch::optim would.
  // Nothing is copied; references to groups and options stay valid.
  struct OnlyGroup {
    Groups &groups, &one;
    std::size_t at;
    OnlyGroup(Groups& all, Groups& spare, std::size_t index) : groups(all), one(spare), at(index) {
      one.clear();
      one.push_back(std::move(groups[at]));
      groups.swap(one);
    }
    ~OnlyGroup() {
      groups.swap(one);
      groups[at] = std::move(one.front());
      one.clear();
    }
  };

  // Lists hold no gradient after a step, however it ends.
  struct Emptied {
    FusedGroups& fused;
    ~Emptied() {
      fused.entries_.clear();
      for (auto& call : fused.calls_) call.clear();
    }
  };

  // In the order of the groups, as torch::optim does: a parameter may be in two.
  template <class Kernel>
  void step_groups(torch::optim::Optimizer& optimizer) {
    const c10::NoGradGuard no_grad;
    Groups& groups = optimizer.param_groups();
    refusals_.assign(groups.size(), nullptr);
    shared_.resize(groups.size());
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const Emptied emptied{*this};
      refusals_[i] = look_at<Kernel>(optimizer, groups[i], shared_[i]);
      if (!refusals_[i]) step_fused<Kernel>(optimizer, static_cast<typename Kernel::Options&>(groups[i].options()));
      else step_plain(optimizer, groups, i);
    }
  }

  void step_plain(torch::optim::Optimizer& optimizer, Groups& groups, std::size_t index) {
    const OnlyGroup only(groups, one_group_, index);
    optimizer.step();
  }

  // Lists the parameters that have gradients. Says why the group cannot be stepped by kernels; changes nothing.
  template <class Kernel>
  const char* look_at(torch::optim::Optimizer& optimizer, torch::optim::OptimizerParamGroup& group,
                      SharedMemory& shared) {
    const torch::optim::OptimizerOptions& given = group.options();
    if (typeid(given) != typeid(typename Kernel::Options)) return "its options are of another class";
    const auto& options = static_cast<const typename Kernel::Options&>(given);
    shared.begin();
    for (const at::Tensor& parameter : group.params()) {
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      if (const char* why = refusal(parameter, gradient)) return why;
      if (const char* why = Kernel::refusal(options, parameter)) return why;
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      auto* const state = found == optimizer.state().end() ? nullptr : found->second.get();
      const char* bad_state = nullptr;
      if (state)
        Kernel::each(options, static_cast<typename Kernel::State&>(*state), [&](const at::Tensor& tensor) {
          if (!bad_state) bad_state = state_refusal(parameter, tensor);
        });
      if (bad_state) return bad_state;
      if (parameter.numel() > 0) shared.see(parameter);
      entries_.push_back({&parameter, state});
    }
    return shared.found() ? "two of its parameters share memory" : nullptr;
  }

  // Steps what look_at() listed. The counters move when the kernels have been called, not before.
  template <class Kernel>
  void step_fused(torch::optim::Optimizer& optimizer, const typename Kernel::Options& options) {
    using ParamState = typename Kernel::State;
    for (Entry& entry : entries_) {
      const std::int64_t due = Kernel::due(options, static_cast<const ParamState*>(entry.state));
      if (!entry.state && Kernel::keeps_state(options)) {
        auto& slot = optimizer.state()[entry.parameter->unsafeGetTensorImpl()];
        entry.state = (slot = std::make_unique<ParamState>()).get();
      }
      add<Kernel>(options, *entry.parameter, static_cast<ParamState*>(entry.state), due);
    }
    for (FusedCall& call : calls_)
      if (!call.parameters.empty()) Kernel::call(options, call);
    for (const Entry& entry : entries_)
      if (entry.state) Kernel::advance(static_cast<ParamState&>(*entry.state));
  }

  template <class Kernel>
  void add(const typename Kernel::Options& options, const at::Tensor& parameter, typename Kernel::State* state,
           std::int64_t due) {
    bool literal = parameter.strides() == parameter.grad().strides();
    if (state)
      Kernel::each(options, *state, [&](at::Tensor& tensor) {
        if (!tensor.defined()) tensor = Kernel::first(options, parameter);
        literal = literal && tensor.strides() == parameter.strides();
      });
    if (parameter.numel() == 0) return;
    const auto as_taken = [&](const at::Tensor& tensor) { return literal ? tensor : as_row(tensor); };
    FusedCall& call = call_for(parameter, due);
    call.parameters.push_back(as_taken(parameter));
    call.gradients.push_back(as_taken(parameter.grad()));
    std::size_t at = 0;
    if (state) Kernel::each(options, *state, [&](const at::Tensor& t) { call.state[at++].push_back(as_taken(t)); });
  }

  // Parameters of one kind come in runs, so the first or the last call is nearly always the right one.
  FusedCall& call_for(const at::Tensor& parameter, std::int64_t due) {
    const auto same_kind = [&](const FusedCall& call) {
      return call.dtype == parameter.scalar_type() && call.device == parameter.device();
    };
    auto call = std::ranges::find_if(
        calls_, [&](const auto& known) { return !known.parameters.empty() && known.step == due && same_kind(known); });
    if (call != calls_.end()) return *call;
    call =
        std::ranges::find_if(calls_, [&](const auto& known) { return known.parameters.empty() && same_kind(known); });
    if (call == calls_.end())
      call = calls_.insert(call, FusedCall{.device = parameter.device(), .dtype = parameter.scalar_type()});
    call->step = due;
    return *call;
  }

  std::vector<const char*> refusals_;
  std::vector<SharedMemory> shared_;  // by group
  std::vector<Entry> entries_;        // of the group in hand
  std::vector<FusedCall> calls_;
  Groups one_group_;
};

}  // namespace frugal::inline v0::detail
