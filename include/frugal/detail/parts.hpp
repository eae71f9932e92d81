#pragma once

#include <frugal/detail/batch_weight.hpp>
#include <frugal/detail/best_weights.hpp>
#include <frugal/detail/composition.hpp>
#include <frugal/detail/evaluation.hpp>
#include <frugal/detail/loss_log.hpp>
#include <frugal/detail/place.hpp>
#include <frugal/detail/run_memory.hpp>
#include <frugal/policy.hpp>
#include <frugal/update.hpp>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

namespace frugal::inline v0::detail {

// What a Trainer is made of, and what its verbs do in detail. The order in which they are called is the Trainer's.
template <class Model, class Optimizer, class Loss, class... Policies>
class Parts {
 protected:
  using Composed = Composition<Model, Optimizer, Policies...>;
  static_assert(sizeof(Composed) > 0);  // has its say
  template <Role R>
  static constexpr bool absent = Composed::template absent<R>;

  Parts(Model& model, Optimizer& optimizer, Loss loss, Policies... policies)
      : model_(model), optimizer_(optimizer), loss_(std::move(loss)), policies_(std::move(policies)...) {}

  template <Role R>
  auto& in() {
    return slot<R, Composed::template fits<R>>(policies_);
  }
  auto& precision() { return in<Role::precision>(); }
  auto& accumulation() { return in<Role::accumulation>(); }
  auto& clipping() { return in<Role::clipping>(); }
  auto& updating() { return in<Role::update>(); }
  auto& schedule() { return in<Role::schedule>(); }
  auto& averaging() { return in<Role::averaging>(); }
  auto& stopping() { return in<Role::stopping>(); }
  auto& checkpointing() { return in<Role::checkpointing>(); }
  auto& interruption() { return in<Role::interruption>(); }

  void each_policy(auto&& visit) {
    std::apply([&](auto&... policy) { (visit(policy), ...); }, policies_);
  }
  void phase(Phase next) {
    each_policy([&](auto& policy) {
      if constexpr (requires { policy.on_phase(next); }) policy.on_phase(next);
    });
  }
  // What makes the Readings of this moment. They are collected when somebody looks, not before.
  auto readings() {
    return [this] {
      return Readings([this](Readings& out) {
        each_policy([&](auto& policy) {
          if constexpr (requires { policy.readings(out); }) policy.readings(out);
        });
        if constexpr (keeps_metrics)
          if (metrics_)
            for (const auto& [name, value] : *metrics_) out.write(name, value);
      });
    };
  }

  auto watch() {  // tells whoever watches gradients; empty when nobody does
    if constexpr ((WatchesGradients<Policies, Model> || ...))
      return [this] { each_policy([&](auto& policy) { call_on_gradients(policy, model_, readings()); }); };
    else return [] {};
  }

  // Before the first step since the run began or was continued: the weights that were being trained, no gradient from
  // outside of the window, the rates of the step that is due.
  void begin() {
    if constexpr (requires { checkpointing().claim(); })
      checkpointing().claim();  // its errors come before the first epoch
    begun_ = true;
    place_.begin();
    if (averaging().swapped()) averaging().swap(model_);
    if (trained_.kept()) trained_.restore(model_, optimizer_), trained_.forget();
    if (!accumulation().pending()) optimizer_.zero_grad();
    schedule().apply(optimizer_, progress_.step);
  }

  // The mean loss of a batch and its weight, in the precision of the policy.
  template <class Batch>
  auto evaluate(const Batch& batch) {
    auto value = [&] {
      [[maybe_unused]] auto guard = precision().autocast();
      return loss_(model_, batch);
    }();
    if constexpr (requires {
                    value.loss;
                    value.weight;
                  })
      return value;
    else {
      static_assert(
          absent<Role::accumulation> || weighable<Batch>,
          "Trainer: the accumulator cannot tell the weight of this batch. Return frugal::Weighted{loss, samples "
          "or tokens} from the loss function, or give the batch `std::int64_t size() const`.");
      return Weighted<decltype(value)>{std::move(value), weight_of(batch)};
    }
  }

  // Both policies meet the type of the loss here for the first time.
  template <class Value>
  bool backward(Value& loss, double weight, auto& accumulating) {
    constexpr bool scales = requires { precision().scale(loss); };
    static_assert(scales,
                  "Trainer: the precision policy lacks a verb. Write `autocast()`, `scale(loss)`, `void "
                  "unscale(optimizer, double factor)` and `bool step(optimizer)`.");
    if constexpr (!scales) return false;
    else {
      using Scaled = std::remove_reference_t<decltype(precision().scale(loss))>;
      constexpr bool weighs = AccumulationPolicy<std::remove_cvref_t<decltype(accumulating)>, Scaled>;
      static_assert(weighs,
                    "Trainer: the accumulation policy lacks a verb. Write `bool backward(loss, double weight)`, "
                    "`double factor() const`, `bool pending() const` and `void finish()`.");
      if constexpr (weighs) return frugal::backward(loss, weight, precision(), accumulating);
      else return false;
    }
  }

  // What throws on the way drops the window: the next one starts without gradients, and its loss is its own.
  auto or_drop_window(auto&& body) {
    try {
      if constexpr (!absent<Role::checkpointing>) saving_.midway = true;
      const auto result = body();
      if constexpr (!absent<Role::checkpointing>) saving_.midway = false;
      return result;
    } catch (...) {
      if constexpr (!absent<Role::checkpointing>) saving_.midway = false;
      optimizer_.zero_grad();
      accumulation().finish();
      loss_log_.drop();
      place_.close(progress_);
      throw;
    }
  }

  template <class Batch>
  void consumed(const Batch& batch, const auto& loss, double weight) {
    ++progress_.micro_batch;
    if constexpr (can_count<Batch>()) progress_.samples += samples_in(batch);
    loss_log_.add(loss, weight);
    moved();
  }
  // There is something that is not saved.
  void moved() {
    if constexpr (!absent<Role::checkpointing>) moved_ = true;
  }

  void count_epoch() {
    ++progress_.epoch;
    progress_.micro_batch = 0;
    stage_ = EpochStage::outside;
    moved();
    read_loss();
  }

  // One device sync per window at most, and only when somebody asks.
  void read_loss() const {
    if (const auto loss = loss_log_.take()) progress_.loss = *loss;
  }

  using Kept = Tensor<Model, Optimizer>;
  static constexpr bool accumulates = !absent<Role::accumulation>;
  using LossLog = std::conditional_t<accumulates, WindowLoss<Kept>, LastLoss<Kept>>;
  static constexpr bool keeps_weights = !absent<Role::stopping> && !std::is_same_v<Kept, double>;
  // Only a hook that takes Readings can look at the metrics of the last validation.
  static constexpr bool keeps_metrics = (takes_readings<Policies, Model> || ...);

  using Random = typename RandomStateOf<typename Composed::template In<Role::checkpointing>>::type;

  // What a save has to know of the steps.
  struct Saving {
    bool midway = false;           // in a backward pass or an update: gradients and books do not fit together
    std::int64_t unmeasured = -1;  // the step that was saved before it had its check
  };
  struct NoSaving {};

  Model& model_;
  Optimizer& optimizer_;
  [[no_unique_address]] Loss loss_;
  [[no_unique_address]] std::tuple<Policies...> policies_;
  mutable Progress progress_;
  mutable LossLog loss_log_;
  bool begun_ = false;
  bool moved_ = false;  // since the last save
  EpochStage stage_ = EpochStage::outside;
  [[no_unique_address]] std::conditional_t<keeps_weights, KeptWeights<Kept>, NoWeights> best_;
  // What was being trained, while the model holds the best weights. Another type: two empty members of one type have a size.
  struct NoneTrained : NoWeights {};
  [[no_unique_address]] std::conditional_t<keeps_weights, KeptWeights<Kept>, NoneTrained> trained_;
  [[no_unique_address]] std::conditional_t<absent<Role::checkpointing>, NoPlace, Place<Random>> place_;
  [[no_unique_address]] std::conditional_t<absent<Role::checkpointing>, NoSaving, Saving> saving_;
  [[no_unique_address]] std::conditional_t<keeps_metrics, std::optional<Metrics>, Nothing> metrics_;
};

}  // namespace frugal::inline v0::detail
