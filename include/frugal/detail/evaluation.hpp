#pragma once

#include <frugal/detail/module.hpp>
#include <frugal/policy.hpp>

#include <concepts>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace frugal::inline v0::detail {

struct NoValidation {};

template <class Validate>
constexpr bool validates = !std::same_as<std::remove_cvref_t<Validate>, NoValidation>;

// Runs `cleanup` after `body` on every way out. An exception of `body` is the one that leaves.
void and_always(auto&& body, auto&& cleanup) {
  try {
    body();
  } catch (...) {
    try {
      cleanup();
    } catch (...) {  // the first error is the one that explains
    }
    throw;
  }
  cleanup();
}

void train_mode(auto& model) {
  if constexpr (requires { module_of(model).train(); }) module_of(model).train();
}
void eval_mode(auto& model) {
  if constexpr (requires { module_of(model).eval(); }) module_of(model).eval();
}

template <class Value>
concept ZeroDimTensor = requires(const Value& value) { value.template item<double>(); };

// What validate() may return. A bool is no metric.
template <class Value>
concept Metric = std::same_as<std::remove_cvref_t<Value>, Metrics> || ZeroDimTensor<std::remove_cvref_t<Value>> ||
                 (std::is_arithmetic_v<std::remove_cvref_t<Value>> && !std::same_as<std::remove_cvref_t<Value>, bool>);

template <Metric Value>
Metrics metrics_of(Value&& value) {
  if constexpr (std::is_arithmetic_v<std::remove_cvref_t<Value>>) return Metrics(static_cast<double>(value));
  else if constexpr (ZeroDimTensor<std::remove_cvref_t<Value>>) return Metrics(value.template item<double>());
  else return std::forward<Value>(value);
}

// A batch source that can start in the middle of an epoch.
template <class Batches>
concept Positioned = requires(Batches& batches, std::int64_t n) { batches.epoch(n, n).begin(); };
// A container, a DataLoader, a generator.
template <class Batches>
concept PlainRange = requires(Batches& batches) {
  *batches.begin();
  batches.begin() != batches.end();
};

// What the running epoch has left: a range, and how many of its first batches are consumed already.
template <class Range>
struct Rest {
  Range range;
  std::int64_t consumed;
};
template <class Batches>
auto rest_of_epoch(Batches& batches, const Progress& at) {
  if constexpr (Positioned<Batches>)
    return Rest<decltype(batches.epoch(at.epoch, at.micro_batch))>{batches.epoch(at.epoch, at.micro_batch), 0};
  else return Rest<Batches&>{batches, at.micro_batch};
}

}  // namespace frugal::inline v0::detail
