#pragma once

#include <frugal/detail/module.hpp>

#include <c10/core/ScalarType.h>

#include <concepts>
#include <limits>
#include <optional>
#include <ranges>
#include <type_traits>
#include <utility>
#include <vector>

// The mean loss of a window, remembered without being read: reading it from a device stalls the loop.
namespace frugal::inline v0::detail {

// The tensor type of the model, or of the optimizer when the model is no module; double when neither shows one.
template <class Model, class Optimizer>
auto tensor_of() {
  if constexpr (requires(Model& model) { module_of(model).parameters()[0]; })
    return std::type_identity<std::remove_cvref_t<decltype(module_of(std::declval<Model&>()).parameters()[0])>>{};
  else if constexpr (requires(Optimizer& optimizer) { optimizer.param_groups()[0].params()[0]; })
    return std::type_identity<
        std::remove_cvref_t<decltype(std::declval<Optimizer&>().param_groups()[0].params()[0])>>{};
  else return std::type_identity<double>{};
}
template <class Model, class Optimizer>
using Tensor = typename decltype(tensor_of<Model, Optimizer>())::type;

double read_number(const auto& value) {
  if constexpr (requires { value.template item<double>(); }) return value.template item<double>();
  else if constexpr (requires { static_cast<double>(value); }) return static_cast<double>(value);
  else return std::numeric_limits<double>::quiet_NaN();  // a loss that only backpropagates
}

// What is kept of a loss: the tensor cut off from its graph, or the number itself.
template <class Kept>
Kept detached(const auto& loss) {
  if constexpr (requires {
                  { loss.detach() } -> std::convertible_to<Kept>;
                })
    return loss.detach();
  else if constexpr (std::is_same_v<Kept, double>) return read_number(loss);
  else return Kept{};
}

// Windows of one micro-batch: the last loss. It counts when the window is closed; a window that is dropped takes an unread
// loss before it along, so that one loss is all there is to keep.
template <class Loss>
class LastLoss {
 public:
  void add(const auto& loss, double weight) {
    if (weight != 0) last_ = detached<Loss>(loss), unread_ = false;
  }
  void close() { unread_ = true; }
  static void drop() {}
  // The mean loss of the last closed window, if nobody took it yet: one device sync.
  std::optional<double> take() {
    if (!std::exchange(unread_, false)) return std::nullopt;
    return read_number(last_);
  }
  void reset() { unread_ = false; }

  static void save(auto&) {}
  static void load(auto&) {}

 private:
  Loss last_{};
  bool unread_ = false;
};

// Windows of several: the weighted mean of the last closed one. Losses are summed where they are, so that a window is one
// read, and no tensor is made before somebody asks.
template <class Loss>
class WindowLoss {
 public:
  void add(const auto& loss, double weight) {
    if (weight != 0) open_.losses.emplace_back(detached<Loss>(loss), weight);
  }
  void close() {
    std::swap(open_, closed_);
    open_.clear();
  }
  void drop() { open_.clear(); }
  // The mean loss of the last closed window, if nobody took it yet: one device sync.
  std::optional<double> take() {
    const auto [sum, weight] = closed_.total();
    closed_.clear();
    return weight > 0 ? std::optional(sum / weight) : std::nullopt;
  }
  void reset() { open_.clear(), closed_.clear(); }

  void save(auto& out) const {
    const auto [sum, weight] = open_.total();
    out.write("loss_sum", sum);
    out.write("loss_weight", weight);
  }
  void load(auto& in) {
    reset();
    in.read("loss_sum", open_.sum);
    in.read("loss_weight", open_.weight);
  }

 private:
  struct Window {
    std::vector<std::pair<Loss, double>> losses = {};
    double sum = 0, weight = 0;  // of what came out of a checkpoint

    void clear() {
      losses.clear();  // keeps its capacity: no allocation in a steady loop
      sum = weight = 0;
    }
    std::pair<double, double> total() const {
      if (losses.empty()) return {sum, weight};
      double all = weight;
      for (const auto& [loss, one] : losses) all += one;
      if constexpr (requires(const Loss& loss) { loss.to(c10::ScalarType::Double).mul(1.0).add(loss); }) {
        const auto part = [](const auto& one) { return one.first.to(c10::ScalarType::Double).mul(one.second); };
        Loss on_device = part(losses.front());
        for (const auto& one : losses | std::views::drop(1)) on_device = on_device.add(part(one));
        return {sum + read_number(on_device), all};
      } else {
        double here = sum;
        for (const auto& [loss, one] : losses) here += read_number(loss) * one;
        return {here, all};
      }
    }
  };
  Window open_, closed_;
};

}  // namespace frugal::inline v0::detail
