#pragma once

#include <frugal/detail/module.hpp>
#include <frugal/detail/writable.hpp>

#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>
#include <c10/core/Layout.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// Calls visit(name, tensor) for every parameter and buffer of the model; of the optimizer's parameters, by position,
// when the model is no module.
void each_weight(auto& model, auto& optimizer, auto&& visit) {
  if constexpr (requires {
                  module_of(model).named_parameters();
                  module_of(model).named_buffers();
                }) {
    for (auto& item : module_of(model).named_parameters()) visit(item.key(), item.value());
    for (auto& item : module_of(model).named_buffers()) visit(item.key(), item.value());
  } else if constexpr (requires { optimizer.param_groups(); }) {
    std::int64_t position = 0;
    for (auto& group : optimizer.param_groups())
      for (auto& parameter : group.params()) visit(std::to_string(position++), parameter);
  }
}

// A copy in host memory. Plain memory is copied by memcpy: the tensor copy goes through the thread pool and collapses
// when the cores are busy.
template <class Tensor>
void copy_to_host(Tensor& kept, const Tensor& live) {
  const Tensor source = live.detach();
  const bool reusable = kept.defined() && kept.sizes() == source.sizes() && kept.scalar_type() == source.scalar_type();
  if (!reusable) kept = source.to(c10::DeviceType::CPU, source.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  else if (source.numel() == 0) return;  // it may have no memory to point to
  else if (source.layout() == c10::kStrided && source.is_cpu() && source.is_contiguous() && kept.is_contiguous())
    std::memcpy(kept.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
  else kept.copy_(source);
}

// The parameters and buffers of one moment, by name, in host memory: they cost the model's size there and nothing on the
// device.
template <class Tensor>
class KeptWeights {
 public:
  bool kept() const { return !kept_.empty(); }
  void forget() { kept_.clear(); }

  void keep(auto& model, auto& optimizer) {
    const c10::NoGradGuard no_grad;
    std::size_t at = 0;
    each_weight(model, optimizer, [&](const std::string& name, const Tensor& live) {
      if (at == kept_.size() || kept_[at].first != name) {  // the first time, or another structure
        kept_.resize(at);
        kept_.emplace_back(name, Tensor{});
      }
      copy_to_host(kept_[at++].second, live);
    });
    kept_.resize(at);
  }

  // Throws, before anything changed, when the model is no longer the one that was kept, or cannot be written.
  void restore(auto& model, auto& optimizer) const {
    const c10::NoGradGuard no_grad;
    std::vector<std::pair<Tensor, const Tensor*>> pairs;
    each_weight(model, optimizer, [&](const std::string& name, const Tensor& live) {
      const std::size_t at = pairs.size();
      if (at >= kept_.size() || kept_[at].first != name || kept_[at].second.sizes() != live.sizes())
        throw std::runtime_error("Trainer: the weights that were kept do not fit the model, '" + name +
                                 "' differs. Register modules and parameters before fit().");
      if (const char* why = not_writable(live, kept_[at].second))
        throw std::runtime_error("Trainer: the weights that were kept cannot be restored, '" + name + "' " + why +
                                 ". Give it memory of its own (clone()) before fit().");
      pairs.emplace_back(live, &kept_[at].second);
    });
    for (auto& [live, kept] : pairs) write_values(live, *kept);
  }

  // Where save() puts which weight (checkpoint_measured.hpp).
  void measured(auto&& out, const std::string& as) const {
    for (std::size_t i = 0; i < kept_.size(); ++i) out(kept_[i].first, as + ".value." + std::to_string(i));
  }
  void save(auto& out, const std::string& as) const {
    out.write(as + ".count", static_cast<std::int64_t>(kept_.size()));
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      out.write(as + ".name." + std::to_string(i), kept_[i].first);
      out.write(as + ".value." + std::to_string(i), kept_[i].second);
    }
  }
  void load(auto& in, const std::string& as) {
    std::int64_t count = 0;
    in.read(as + ".count", count);
    std::vector<std::pair<std::string, Tensor>> kept(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < kept.size(); ++i) {
      in.read(as + ".name." + std::to_string(i), kept[i].first);
      in.read(as + ".value." + std::to_string(i), kept[i].second);
    }
    kept_ = std::move(kept);
  }

 private:
  std::vector<std::pair<std::string, Tensor>> kept_;
};

// Without a stopping policy, or without tensors, there is nothing to bring back.
struct NoWeights {
  static constexpr bool kept() { return false; }
  static void forget() {}
  static void keep(auto&, auto&) {}
  static void restore(auto&, auto&) {}
  static void measured(auto&&, const char*) {}
  static void save(auto&, const char*) {}
  static void load(auto&, const char*) {}
};

}  // namespace frugal::inline v0::detail
