#pragma once

#include <frugal/detail/lerp.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// The averages of one model's floating-point parameters, by name.
class Averages {
 public:
  Averages() = default;
  Averages(const Averages&) = default;
  Averages& operator=(const Averages&) = default;
  Averages(Averages&& other) noexcept { *this = std::move(other); }
  // The other one has no model any more, and no averages.
  Averages& operator=(Averages&& other) noexcept {
    module_ = std::exchange(other.module_, nullptr);
    entries_ = std::exchange(other.entries_, {});
    kinds_ = std::exchange(other.kinds_, {});
    swapped_ = std::exchange(other.swapped_, false);
    return *this;
  }

  bool swapped() const { return swapped_; }

  // Makes the entries those of `module`. Cheap when they already are: no allocation, one look at every parameter.
  void follow(const auto& module) {
    if (module_ != static_cast<const void*>(&module)) {
      bind(module);
      module_ = &module;
    }
    bool changed = false;
    for (Entry& entry : entries_) changed |= catch_up(entry);
    if (changed) group();
  }

  // average += weight * (parameter - average), a copy where there was none.
  void mix(double weight) {
    const c10::NoGradGuard off;
    for (Kind& kind : kinds_) {
      if (kind.same_dtype) {
        lerp_(kind.averages, kind.parameters, weight);
      } else {
        at::_foreach_mul_(kind.averages, 1.0 - weight);
        at::_foreach_add_(kind.averages, kind.parameters, weight);
      }
    }
  }

  void swap() {
    const c10::NoGradGuard off;
    for (Entry& entry : entries_) {
      if (!entry.average.defined()) continue;
      if (entry.same_dtype()) {
        const at::Tensor weights = entry.parameter.clone();
        entry.parameter.copy_(entry.average);
        entry.average.copy_(weights);  // the slot holds the weights for now
      } else if (swapped_) {
        entry.parameter.copy_(entry.weights);
        entry.weights.reset();
      } else {
        entry.weights = entry.parameter.clone();  // rounding the average back would not give it again
        entry.parameter.copy_(entry.average);
      }
    }
    swapped_ = !swapped_;
  }

  void to(at::Device device) {
    for (Entry& entry : entries_) {
      if (entry.average.defined()) entry.average = entry.average.to(device);
      if (entry.weights.defined()) entry.weights = entry.weights.to(device);
    }
    group();
  }

  void save(auto& out) const {
    std::string names;
    for (const Entry& entry : entries_) names += entry.name + '\n';
    out.write("names", names);
    out.write("swapped", static_cast<std::int64_t>(swapped_));
    for (const Entry& entry : entries_) {
      if (!entry.average.defined()) continue;
      const bool exchanged = swapped_ && entry.parameter.defined() && entry.same_dtype();
      out.write("average." + entry.name, exchanged ? entry.parameter.detach() : entry.average);
      if (swapped_) out.write("weights." + entry.name, exchanged ? entry.average : entry.weights);
    }
  }

  // Calls out(parameter, name of its average in save()) if this is the model whose averages these are; tied parameters have
  // one average.
  void measured(const auto& module, auto&& out) const {
    const auto parameters = module.named_parameters();
    const auto own = [&](const Entry& entry) {
      const at::Tensor* const found = parameters.find(entry.name);
      if (!found) return false;
      return entry.parameter.defined() ? entry.parameter.is_same(*found) : fits(entry.average, *found);
    };
    if (!std::ranges::all_of(entries_, own)) return;
    for (const Entry& entry : entries_)
      for (const auto& item : parameters)
        if (entry.average.defined() && item.value().is_same(parameters[entry.name]))
          out(item.key(), "average." + entry.name);
  }

  void load(auto& in) {
    std::string names;
    std::int64_t swapped = 0;
    in.read("names", names);
    in.read("swapped", swapped);
    *this = Averages();
    swapped_ = swapped != 0;
    std::istringstream lines(names);
    for (std::string name; std::getline(lines, name);) {
      Entry& entry = entries_.emplace_back(Entry{.name = name});
      if (in.has("average." + name)) in.read("average." + name, entry.average);
      if (in.has("weights." + name)) in.read("weights." + name, entry.weights);
    }
  }

 private:
  struct Entry {
    std::string name;
    at::Tensor parameter = {};  // undefined between load() and the first follow()
    at::Tensor average = {};    // undefined while the parameter was never trained
    at::Tensor weights = {};    // of a low-precision parameter, while the average is in it

    bool same_dtype() const { return average.scalar_type() == parameter.scalar_type(); }
  };
  // What one foreach kernel takes.
  struct Kind {
    at::Device device;
    at::ScalarType dtype;
    bool same_dtype;
    std::vector<at::Tensor> averages = {}, parameters = {};
  };

  static bool fits(const at::Tensor& average, const at::Tensor& parameter) {
    return !average.defined() ||
           (average.sizes() == parameter.sizes() && average.scalar_type() == average_dtype(parameter));
  }
  static at::ScalarType average_dtype(const at::Tensor& parameter) {
    const at::ScalarType dtype = parameter.scalar_type();
    return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
  }

  void bind(const auto& module) {
    const bool elsewhere =
        swapped_ && std::ranges::any_of(entries_, [](const Entry& e) { return e.parameter.defined(); });
    TORCH_CHECK(!elsewhere, "Averager: the average is still in another model. Call swap() with that one first.");
    std::vector<Entry> bound;
    for (const auto& item : module.named_parameters()) {
      const at::Tensor& parameter = item.value();
      const auto tied = [&](const Entry& entry) { return entry.parameter.is_same(parameter); };
      if (!parameter.defined() || !(parameter.is_floating_point() || parameter.is_complex())) continue;
      if (std::ranges::any_of(bound, tied)) continue;  // swapping a tied parameter twice would undo it
      bound.push_back(Entry{.name = item.key(), .parameter = parameter});
    }
    if (!entries_.empty()) take_over(bound);
    entries_ = std::move(bound);
    group();
  }

  // The averages of a loaded state, or of another instance of the model.
  void take_over(std::vector<Entry>& bound) const {
    const auto named = [](const std::string& name) {
      return [&name](const Entry& entry) { return entry.name == name; };
    };
    for (const Entry& known : entries_)
      TORCH_CHECK(std::ranges::any_of(bound, named(known.name)), "Averager: the average has '", known.name,
                  "', which this model has not. Use one Averager per model, and the state of the same model.");
    for (Entry& entry : bound) {
      const auto known = std::ranges::find_if(entries_, named(entry.name));
      TORCH_CHECK(known != entries_.end(), "Averager: this model has '", entry.name,
                  "', which the average has not. Use one Averager per model, and the state of the same model.");
      entry.average = known->average;
      entry.weights = known->weights;
      if (!entry.average.defined()) continue;
      TORCH_CHECK(fits(entry.average, entry.parameter), "Averager: '", entry.name, "' is ",
                  entry.parameter.scalar_type(), entry.parameter.sizes(), " in this model, its average is ",
                  entry.average.scalar_type(), entry.average.sizes(), ". Use the state of the same model.");
      if (swapped_ && entry.same_dtype()) entry.average = std::exchange(entry.weights, {});
    }
  }

  // Starts the average of a parameter that is trained from now on, and follows it to its device and into its order in
  // memory: kernels round differently where orders differ, and what comes from a checkpoint lies in the plain one. True:
  // something changed.
  static bool catch_up(Entry& entry) {
    const at::Tensor& parameter = entry.parameter;
    if (!entry.average.defined()) {
      if (!parameter.requires_grad()) return false;
      entry.average = parameter.detach().to(average_dtype(parameter), /*non_blocking=*/false, /*copy=*/true);
      return true;
    }
    const bool ordered = !parameter.is_non_overlapping_and_dense() || entry.average.strides() == parameter.strides();
    if (ordered && entry.average.device() == parameter.device()) return false;
    const auto follow = [&](at::Tensor& own) {
      if (own.defined()) own = at::empty_like(parameter.detach(), at::TensorOptions(own.scalar_type())).copy_(own);
    };
    follow(entry.average), follow(entry.weights);
    return true;
  }

  void group() {
    kinds_.clear();
    for (const Entry& entry : entries_) {
      if (!entry.average.defined() || !entry.parameter.defined()) continue;
      const auto fits = [&](const Kind& kind) {
        return kind.device == entry.average.device() && kind.dtype == entry.parameter.scalar_type();
      };
      auto kind = std::ranges::find_if(kinds_, fits);
      if (kind == kinds_.end())
        kind = kinds_.insert(kind, Kind{entry.average.device(), entry.parameter.scalar_type(), entry.same_dtype()});
      kind->averages.push_back(entry.average);
      kind->parameters.push_back(entry.parameter);
    }
  }

  const void* module_ = nullptr;
  std::vector<Entry> entries_;
  std::vector<Kind> kinds_;
  Lerp lerp_;
  bool swapped_ = false;
};

}  // namespace frugal::inline v0::detail
