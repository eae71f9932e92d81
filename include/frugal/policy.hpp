#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <ranges>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

/// The vocabulary that policies and the Trainer share. A policy knows this header and nothing else of frugal.
namespace frugal::inline v0 {

/// The place a policy takes in the loop: at most one policy per role, any number of observers. A class becomes a policy
/// by naming its role: `static constexpr frugal::Role role = frugal::Role::observer;`
enum class Role {
  precision,
  accumulation,
  clipping,
  update,
  schedule,
  averaging,
  stopping,
  checkpointing,
  interruption,
  observer,
  before_training
};

/// What one micro-batch did to the weights. `skipped`: the gradients overflowed and nothing advanced. With
/// SkipDecision::lagged `applied` is as far as is known: Progress, on_skip and settle() have the last word.
enum class StepResult { accumulated, applied, skipped };

/// "accumulated", "applied" or "skipped".
constexpr const char* to_string(StepResult result) {
  constexpr const char* words[] = {"accumulated", "applied", "skipped"};
  return words[static_cast<int>(result)];
}

/// What one validation metric means for the run.
enum class Verdict { improved, waiting, stop };

/// Why a run ended; `none` while it goes on.
enum class StopReason { none, finished, plateau, target_reached, diverged, non_finite, preempted, budget };

/// Which metrics are better: lower ones (a loss) or higher ones (an accuracy).
enum class Goal { minimize, maximize };

/// What happens to an unfinished window at the end of an epoch. flush: step on it, exactly weighted. carry: it goes on in
/// the next epoch (the end of training flushes it).
enum class AtEpochEnd { flush, carry };

/// What the loop is about to do; an observer with `on_phase(Phase)` hears of every change.
enum class Phase { data, forward, backward, update, validation, save };

/// Where a run stands. Everything counts from the start of the run, across interruptions.
struct Progress {
  std::int64_t epoch = 0;                                    ///< completed epochs
  std::int64_t micro_batch = 0;                              ///< micro-batches consumed in the running epoch
  std::int64_t step = 0;                                     ///< optimizer steps applied
  std::int64_t skipped = 0;                                  ///< optimizer steps skipped for overflow
  std::int64_t samples = 0;                                  ///< samples consumed
  double loss = std::numeric_limits<double>::quiet_NaN();    ///< mean training loss of the last window that was read
  double metric = std::numeric_limits<double>::quiet_NaN();  ///< the last validation's watched metric
  std::int64_t metric_step = -1;  ///< the step whose weights `metric` belongs to; -1: never validated
};

/// A mean loss and the number of samples or tokens behind it. A loss function returns it where the size of the batch is
/// the wrong weight, for example with padding:
///
///     return frugal::Weighted{cross_entropy, tokens};   // any arithmetic type
template <class Loss>
struct Weighted {
  template <class Weight>
    requires std::is_arithmetic_v<Weight>
  constexpr Weighted(Loss mean, Weight behind_it) : loss(std::move(mean)), weight(static_cast<double>(behind_it)) {}

  Loss loss;
  double weight;
};
template <class Loss, class Weight>
Weighted(Loss, Weight) -> Weighted<Loss>;

/// The result of a validation: named numbers, the first of which is the watched one.
///
///     return frugal::Metrics{{"loss", loss}, {"accuracy", accuracy}};   // or just a number
class Metrics {
 public:
  /// One number without a name of its own: "metric".
  Metrics(double watched) : values_{{"metric", watched}} {}
  /// At least one; throws std::invalid_argument on an empty list.
  Metrics(std::initializer_list<std::pair<std::string, double>> values) : values_(values) {
    if (values_.empty()) throw std::invalid_argument("Metrics: the list is empty. Name at least the watched metric.");
  }

  /// The number that stopping, schedules and checkpoints look at.
  double watched() const { return values_.front().second; }
  /// The number of that name; nothing when there is none.
  std::optional<double> find(std::string_view name) const {
    const auto found = std::ranges::find(values_, name, &std::pair<std::string, double>::first);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }
  std::size_t size() const { return values_.size(); }

 private:
  std::vector<std::pair<std::string, double>> values_;
};

/// Named numbers that policies publish for logs: learning `rate`, loss `scale`, gradient `norm`, and the metrics of the
/// last validation. A hook takes them as its second argument:
///
///     frugal::OnStep{[](const Progress& at, const Readings& now) { log(at.step, now.find("rate")); }, 100}
///
/// They are collected at the first look and not before: some (a gradient norm) are read back from a device.
/// Valid during the call of the hook.
class Readings {
 public:
  /// Readings that are written by hand.
  Readings() = default;
  /// Readings that `collect(*this)` fills at the first look.
  explicit Readings(std::function<void(Readings&)> collect) : collect_(std::move(collect)) {}

  /// Adds a number, or replaces the one of that name. What a policy's `readings(out)` calls.
  void write(std::string_view name, double value) {
    const auto known = std::ranges::find(values_, name, &std::pair<std::string, double>::first);
    if (known == values_.end()) values_.emplace_back(name, value);
    else known->second = value;
  }
  /// The number of that name; nothing when nobody publishes it.
  std::optional<double> find(std::string_view name) const {
    const auto& all = collected();
    const auto found = std::ranges::find(all, name, &std::pair<std::string, double>::first);
    return found == all.end() ? std::nullopt : std::optional(found->second);
  }
  auto begin() const { return collected().begin(); }
  auto end() const { return collected().end(); }
  std::size_t size() const { return collected().size(); }

 private:
  const std::vector<std::pair<std::string, double>>& collected() const {
    if (collect_) {
      Readings fresh;
      std::exchange(collect_, nullptr)(fresh);
      for (const auto& [name, value] : values_) fresh.write(name, value);
      values_ = std::move(fresh.values_);
    }
    return values_;
  }

  mutable std::function<void(Readings&)> collect_;
  mutable std::vector<std::pair<std::string, double>> values_;
};

/// Anything that names its role.
template <class Type>
concept Policy = requires {
  { Type::role } -> std::convertible_to<Role>;
};

namespace detail {

// Stand-ins that ask whether a type can be saved, without an archive.
struct AnyOut {
  void write(std::string_view, const auto&) {}
};
struct AnyIn {
  void read(std::string_view, auto&) {}
  bool has(std::string_view) const { return true; }
};
struct AnyState {
  void save(auto&) const {}
  void load(auto&) {}
};

}  // namespace detail

/// Saves and loads itself as name-value pairs of tensors, std::int64_t, double and std::string:
/// `void save(auto& out) const { out.write("scale", scale_); }`, `void load(auto& in) { in.read("scale", scale_); }`.
template <class Type>
concept Stateful = requires(const Type& saved, Type& loaded, detail::AnyOut& out, detail::AnyIn& in) {
  saved.save(out);
  loaded.load(in);
};

// What the loop calls, by role. Optional verbs: see Trainer.

template <class Type, class Optimizer>
concept PrecisionPolicy = Policy<Type> && requires(Type& policy, Optimizer& optimizer, double factor) {
  policy.autocast();
  policy.unscale(optimizer, factor);
  { policy.step(optimizer) } -> std::same_as<bool>;
};

template <class Type, class Loss>
concept AccumulationPolicy = Policy<Type> && requires(Type& policy, Loss& loss, double weight) {
  { policy.backward(loss, weight) } -> std::same_as<bool>;
  { policy.factor() } -> std::convertible_to<double>;
  { policy.pending() } -> std::same_as<bool>;
  policy.finish();
};

template <class Type, class Optimizer>
concept ClippingPolicy = Policy<Type> && requires(Type& policy, Optimizer& optimizer) { policy.clip(optimizer); };

template <class Type, class Optimizer>
concept UpdatePolicy = Policy<Type> && requires(Type& policy, Optimizer& optimizer) { policy.step(optimizer); };

template <class Type, class Optimizer>
concept SchedulePolicy =
    Policy<Type> && requires(Type& policy, Optimizer& optimizer, std::int64_t step) { policy.apply(optimizer, step); };

template <class Type, class Model>
concept AveragingPolicy = Policy<Type> && requires(Type& policy, const Type& fixed, Model& model) {
  policy.update(model);
  policy.swap(model);
  { fixed.averaging() } -> std::same_as<bool>;  // there is an average
  { fixed.swapped() } -> std::same_as<bool>;    // the model holds it, the policy the weights that are trained
};

template <class Type>
concept StoppingPolicy = Policy<Type> && requires(Type& policy, const Type& fixed, double metric) {
  { policy.observe(metric) } -> std::same_as<Verdict>;
  { fixed.reason() } -> std::same_as<StopReason>;
};

template <class Type, class Model, class Optimizer>
concept CheckpointingPolicy = Policy<Type> && requires(Type& policy, const Type& fixed, const Progress& at,
                                                       Model& model, Optimizer& optimizer, detail::AnyState& stateful) {
  { fixed.due(at) } -> std::same_as<bool>;
  policy.save(at, model, optimizer, stateful);
  { policy.restore(model, optimizer, stateful) } -> std::same_as<std::optional<Progress>>;
  policy.wait();
};

template <class Type>
concept InterruptionPolicy = Policy<Type> && requires(const Type& policy) {
  { policy.requested() } -> std::same_as<bool>;
};

}  // namespace frugal::inline v0
