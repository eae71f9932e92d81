#pragma once

#include <frugal/detail/fused_call.hpp>
#include <frugal/detail/fused_kernels.hpp>
#include <frugal/detail/fused_layout.hpp>
#include <frugal/detail/gradients.hpp>
#include <frugal/detail/late_steps.hpp>
#include <frugal/detail/pending.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ranges>
#include <typeinfo>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// Steps optimizers group by group: through a kernel, or as torch::optim would.
class FusedGroups {
 public:
  // False, and nothing happened: the class of the optimizer is not one of the four. The dynamic type decides, since the
  // static one may be the base class; a derived class does not count, since it may step in its own way.
  bool step(torch::optim::Optimizer& optimizer, const PendingScale& pending) {
    return with_kernel(optimizer, [&]<class Kernel>(Kernel) { step_groups<Kernel>(optimizer, pending); });
  }
  // A step with a PendingScale::skip begins; whether it was made here, and is not concluded; what it turned out to be.
  void begin_late(const torch::optim::Optimizer& optimizer) { late_.begin(optimizer); }
  bool is_late(const torch::optim::Optimizer& optimizer) { return late_.is_open(optimizer); }
  void conclude(torch::optim::Optimizer& optimizer, bool applied) {
    if (applied) late_.confirm(optimizer);
    else with_kernel(optimizer, [&]<class Kernel>(Kernel) { late_.take_back<Kernel>(optimizer); });
  }
  // By group, for the last step: why torch::optim stepped it; null where a kernel did.
  const std::vector<const char*>& refusals() const { return refusals_; }

 private:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  struct Entry {
    const at::Tensor *parameter, *gradient;
    torch::optim::OptimizerParamState* state;  // null before the first step
    std::int64_t due = 0;
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
      fused.rows_.clear();
    }
  };

  static bool with_kernel(torch::optim::Optimizer& optimizer, auto&& visit) {
    namespace optim = torch::optim;
    const auto& type = typeid(optimizer);
    if (type == typeid(optim::AdamW)) visit(FusedKernel<optim::AdamW>{});
    else if (type == typeid(optim::Adam)) visit(FusedKernel<optim::Adam>{});
    else if (type == typeid(optim::SGD)) visit(FusedKernel<optim::SGD>{});
    else if (type == typeid(optim::Adagrad)) visit(FusedKernel<optim::Adagrad>{});
    else return false;
    return true;
  }
  // In the order of the groups, as torch::optim does: a parameter may be in two.
  template <class Kernel>
  void step_groups(torch::optim::Optimizer& optimizer, const PendingScale& pending) {
    const c10::NoGradGuard no_grad;
    Groups& groups = optimizer.param_groups();
    refusals_.assign(groups.size(), nullptr);
    shared_.resize(groups.size());
    const bool settled = !pending.settled() && in_two(groups);
    if (settled) pending.settle(optimizer, gradients_);
    const PendingScale multiplied{.skip = pending.skip}, &left = settled ? multiplied : pending;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const Emptied emptied{*this};
      refusals_[i] = look_at<Kernel>(optimizer, groups[i], shared_[i]);
      if (!refusals_[i])
        step_fused<Kernel>(optimizer, static_cast<typename Kernel::Options&>(groups[i].options()), left);
      else step_plain(optimizer, groups, i, left);
    }
  }

  void step_plain(torch::optim::Optimizer& optimizer, Groups& groups, std::size_t index, const PendingScale& pending) {
    if (pending.skips()) return;
    const OnlyGroup only(groups, one_group_, index);
    pending.settle(optimizer, gradients_);
    optimizer.step();
  }

  // Whether a parameter is in two groups: the step of one would multiply the gradients of the other.
  bool in_two(const Groups& groups) {
    if (groups.size() < 2) return false;
    listed_.begin();
    for (const auto& group : groups)
      for (const at::Tensor& parameter : group.params()) listed_.see(parameter.unsafeGetTensorImpl(), 1);
    return listed_.found();
  }

  // Lists the parameters that have gradients. Says why the group cannot be stepped by kernels; changes nothing.
  template <class Kernel>
  const char* look_at(torch::optim::Optimizer& optimizer, torch::optim::OptimizerParamGroup& group,
                      SharedMemory& shared) {
    const torch::optim::OptimizerOptions& given = group.options();
    if (typeid(given) != typeid(typename Kernel::Options)) return "its options are of another class";
    const auto& options = static_cast<const typename Kernel::Options&>(given);
    const auto& states = optimizer.state();
    shared.begin();
    complete_ = true;
    for (const at::Tensor& parameter : group.params()) {
      const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
      if (!gradient.defined()) continue;
      if (const char* why = refusal(parameter, gradient)) return why;
      if (const char* why = Kernel::refusal(options, parameter)) return why;
      const auto found = states.find(parameter.unsafeGetTensorImpl());
      auto* const state = found == states.end() ? nullptr : found->second.get();
      const char* bad_state = nullptr;
      if (state)
        Kernel::each(options, static_cast<typename Kernel::State&>(*state), [&](const at::Tensor& tensor) {
          if (!tensor.defined()) complete_ = false;
          else if (!bad_state) bad_state = state_refusal(parameter, tensor);
        });
      else if (Kernel::keeps_state(options)) complete_ = false;
      if (bad_state) return bad_state;
      if (parameter.numel() > 0) shared.see(parameter.const_data_ptr(), parameter.nbytes());
      entries_.push_back({&parameter, &gradient, state});
    }
    return shared.found() ? "two of its parameters share memory" : nullptr;
  }

  // Steps what look_at() listed. The counters move when the kernels have been called, not before.
  template <class Kernel>
  void step_fused(torch::optim::Optimizer& optimizer, const typename Kernel::Options& options,
                  const PendingScale& pending) {
    using ParamState = typename Kernel::State;
    const bool deals = at::get_num_threads() > 1;
    for (Entry& entry : entries_ | std::views::reverse) {  // clipping has read gradients from first to last
      entry.due = Kernel::due(options, static_cast<const ParamState*>(entry.state));
      if (!complete_) complete<Kernel>(optimizer, options, entry);
      if (entry.parameter->numel() > 0) add<Kernel>(options, entry, deals);
    }
    for (FusedCall& call : calls_)
      if (!call.empty()) call.run<Kernel>(options, pending);
    for (const Entry& entry : entries_)
      if (entry.state) Kernel::advance(static_cast<ParamState&>(*entry.state));
    if (!pending.skip.defined()) return;
    for (const Entry& entry : entries_)
      if (entry.state) late_.count(optimizer, *entry.parameter, *entry.state, entry.due);
  }

  // Makes the state that is missing.
  template <class Kernel>
  static void complete(torch::optim::Optimizer& optimizer, const typename Kernel::Options& options, Entry& entry) {
    using ParamState = typename Kernel::State;
    if (!Kernel::keeps_state(options)) return;
    if (!entry.state)
      entry.state = (optimizer.state()[entry.parameter->unsafeGetTensorImpl()] = std::make_unique<ParamState>()).get();
    Kernel::each(options, static_cast<ParamState&>(*entry.state), [&](at::Tensor& tensor) {
      if (!tensor.defined()) tensor = Kernel::first(options, *entry.parameter);
    });
  }

  template <class Kernel>
  void add(const typename Kernel::Options& options, const Entry& entry, bool deals) {
    using ParamState = typename Kernel::State;
    const at::Tensor &parameter = *entry.parameter, &gradient = *entry.gradient;
    FusedCall& call =
        call_for(parameter, entry.due, deals && parameter.is_cpu() && parameter.numel() <= FusedCall::small);
    const auto each_state = [&](auto&& visit) {
      if (entry.state) Kernel::each(options, static_cast<ParamState&>(*entry.state), visit);
    };
    std::size_t at = 0;
    if (parameter.is_cpu()) {  // copies a gradient that is not contiguous, and has no use for the copy
      call.add(parameter, gradient.is_contiguous() ? gradient : row(gradient));
      each_state([&](const at::Tensor& state) { call.add_state(at++, state); });
      return;
    }
    bool literal = parameter.strides() == gradient.strides();
    each_state([&](const at::Tensor& state) { literal = literal && state.strides() == parameter.strides(); });
    call.add(literal ? parameter : row(parameter), literal ? gradient : row(gradient));
    each_state([&](const at::Tensor& state) { call.add_state(at++, literal ? state : row(state)); });
  }
  const at::Tensor& row(const at::Tensor& dense) { return rows_.emplace_back(as_row(dense)); }

  // Parameters of one kind come in runs, so the first or the last call is nearly always the right one.
  FusedCall& call_for(const at::Tensor& parameter, std::int64_t due, bool dealt) {
    FusedCall* unused = nullptr;
    for (FusedCall& call : calls_) {
      if (!call.takes(parameter, dealt)) continue;
      if (call.empty()) unused = &call;
      else if (call.step() == due) return call;
    }
    if (!unused) return calls_.emplace_back(parameter, due, dealt);
    unused->begin(due);
    return *unused;
  }

  std::vector<const char*> refusals_;
  std::vector<SharedMemory> shared_;  // by group
  SharedMemory listed_;               // the parameters themselves, of all groups
  std::vector<Entry> entries_;        // of the group in hand
  bool complete_ = true;              // they have all their state
  std::vector<FusedCall> calls_;
  std::vector<at::Tensor> rows_;  // what the calls borrow beside what parameters and state own
  LateSteps late_;
  Groups one_group_;
  Gradients gradients_;
};

}  // namespace frugal::inline v0::detail
