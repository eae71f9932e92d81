#pragma once

#include "workloads.hpp"

#include <frugal/frugal.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <torch/torch.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// The training loops that are compared. Each has step(i), one optimizer step on the batches from i * window on, and
// loss(), the mean loss of that step as a tensor.
namespace bench {

using AdamW = torch::optim::AdamW;

inline AdamW adamw(Network& network) {
  return AdamW(network.parameters(), torch::optim::AdamWOptions(learning_rate).weight_decay(weight_decay));
}

/// LibTorch's autocast as its documentation has it in Python: on for the forward pass, its cache cleared after it.
class StockAutocast {
 public:
  StockAutocast(torch::Device device, std::optional<at::ScalarType> dtype) : device_(device.type()), on_(dtype) {
    if (!on_) return;
    at::autocast::set_autocast_dtype(device_, *dtype);
    at::autocast::set_autocast_enabled(device_, true);
  }
  StockAutocast(const StockAutocast&) = delete;
  ~StockAutocast() {
    if (!on_) return;
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, false);
  }

 private:
  at::DeviceType device_;
  bool on_;
};

struct LoopOptions {
  torch::Device device = torch::kCPU;
  std::string precision = "fp32";
  std::int64_t window = 1;  // micro-batches behind a step
  bool fused = true, clip = false, attention_in_fp32 = false, casts_per_step = false, lagged_skips = false;

  std::optional<at::ScalarType> dtype() const {
    if (precision == "bf16") return at::kBFloat16;
    if (precision == "fp16") return at::kHalf;
    return {};
  }
};

// Forward and backward of a step's micro-batches with stock autocast; the last loss.
inline torch::Tensor stock_backward(Workload& work, const LoopOptions& options, std::int64_t step) {
  torch::Tensor loss;
  for (std::int64_t k = 0; k < options.window; ++k) {
    const auto batch = work.at(step * options.window + k);
    {
      const StockAutocast autocast(options.device, options.dtype());
      loss = loss_of(*work.network, batch);
    }
    if (options.window == 1) loss.backward();
    else (loss / options.window).backward();
  }
  return loss;
}

/// What the tutorials show: torch::optim's step, a loss that is divided by the number of micro-batches. Stock autocast.
class NaiveLoop {
 public:
  NaiveLoop(Workload& work, const LoopOptions& options)
      : work_(work), options_(options), optimizer_(adamw(*work.network)) {}

  void step(std::int64_t i) {
    backward(i);
    optimizer_.step();
    optimizer_.zero_grad();
  }
  void forward_backward(std::int64_t i) {
    backward(i);
    optimizer_.zero_grad();
  }
  torch::Tensor loss() const { return loss_; }
  std::string reason() const { return {}; }

 private:
  void backward(std::int64_t i) { loss_ = stock_backward(work_, options_, i); }

  Workload& work_;
  LoopOptions options_;
  AdamW optimizer_;
  torch::Tensor loss_;
};

/// The best that a careful engineer writes without frugal: the fused kernel called directly on buffers made once, one step
/// counter for all tensors, gradients dropped at once.
class BestLoop {
 public:
  BestLoop(Workload& work, const LoopOptions& options)
      : work_(work), options_(options), weights_(work.network->parameters()) {
    for (const auto& weight : weights_) {
      first_.push_back(torch::zeros_like(weight));
      second_.push_back(torch::zeros_like(weight));
    }
    counters_.assign(weights_.size(), torch::zeros({}, torch::TensorOptions(torch::kFloat).device(options.device)));
    gradients_.reserve(weights_.size());
  }

  void step(std::int64_t i) {
    backward(i);
    const torch::NoGradGuard no_grad;
    gradients_.clear();
    for (const auto& weight : weights_) gradients_.push_back(weight.grad());
    counters_.front().add_(1);  // all of them are this one
    at::_fused_adamw_(weights_, gradients_, first_, second_, {}, counters_, learning_rate, 0.9, 0.999, weight_decay,
                      1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
    drop_gradients();
  }
  void forward_backward(std::int64_t i) {
    backward(i);
    drop_gradients();
  }
  torch::Tensor loss() const { return loss_; }
  std::string reason() const { return {}; }

 private:
  void backward(std::int64_t i) { loss_ = stock_backward(work_, options_, i); }
  void drop_gradients() {
    gradients_.clear();
    for (auto& weight : weights_) weight.mutable_grad() = torch::Tensor();
  }

  Workload& work_;
  LoopOptions options_;
  std::vector<torch::Tensor> weights_, first_, second_, counters_, gradients_;
  torch::Tensor loss_;
};

/// A Trainer without policies.
class BareTrainer {
 public:
  BareTrainer(Workload& work, const LoopOptions&)
      : work_(work), optimizer_(adamw(*work.network)), trainer_(*work.network, optimizer_, &loss_of) {}

  void step(std::int64_t i) { trainer_.step(work_.at(i)); }
  void forward_backward(std::int64_t) { throw std::invalid_argument("the Trainer has no half steps"); }
  torch::Tensor loss() const { return torch::tensor(trainer_.progress().loss); }
  std::string reason() const { return {}; }

 private:
  Workload& work_;
  AdamW optimizer_;
  frugal::Trainer<Network, AdamW, decltype(&loss_of)> trainer_;
};

inline frugal::AmpPolicy<> amp_of(const LoopOptions& options) {
  using frugal::Precision;
  frugal::AmpOptions amp;
  if (options.attention_in_fp32) amp.attention = frugal::Attention::fp32;
  if (options.casts_per_step) amp.weight_casts = frugal::WeightCasts::per_step;
  if (options.lagged_skips) amp.skip_decision = frugal::SkipDecision::lagged;
  if (options.precision == "fp32") amp.precision = Precision::fp32;
  if (options.precision == "tf32") amp.precision = Precision::tf32;
  if (options.precision == "bf16") amp.precision = Precision::bf16;
  if (options.precision == "fp16") amp.precision = Precision::fp16;
  return frugal::AmpPolicy<>(options.device, amp);
}

/// A Trainer with every policy that leaves the result as it is. The limit of GradClip is never reached, but the norm is
/// measured; the schedule is constant; nothing is due for saving.
class FullTrainer {
 public:
  FullTrainer(Workload& work, const LoopOptions& options)
      : work_(work),
        options_(options),
        optimizer_(adamw(*work.network)),
        trainer_(*work.network, optimizer_, &loss_of, amp_of(options), frugal::GradAccumulator(options.window),
                 frugal::GradClip(options.clip ? 1e9 : std::numeric_limits<double>::infinity()),
                 frugal::FusedStep({options.fused ? frugal::Stepping::fused : frugal::Stepping::plain}),
                 frugal::Schedule(frugal::constant()), frugal::EarlyStopper(), frugal::CheckpointManager({}),
                 frugal::Preemption({.signals = {}})),
        reason_((options.precision == "calibrated" ? (void)trainer_.calibrate(work.at(0)) : (void)0,
                 trainer_.get<frugal::AmpPolicy<>>().reason())) {}

  void step(std::int64_t i) {
    for (std::int64_t k = 0; k < options_.window; ++k) trainer_.step(work_.at(i * options_.window + k));
  }
  void forward_backward(std::int64_t) { throw std::invalid_argument("the Trainer has no half steps"); }
  torch::Tensor loss() const { return torch::tensor(trainer_.progress().loss); }
  /// Why this precision.
  std::string reason() const { return reason_; }

 private:
  Workload& work_;
  LoopOptions options_;
  AdamW optimizer_;
  frugal::Trainer<Network, AdamW, decltype(&loss_of), frugal::AmpPolicy<>, frugal::GradAccumulator, frugal::GradClip,
                  frugal::FusedStep, frugal::Schedule, frugal::EarlyStopper, frugal::CheckpointManager<>,
                  frugal::Preemption>
      trainer_;
  std::string reason_;
};

/// A loop of the user's own with backward() and update().
class OwnLoop {
 public:
  OwnLoop(Workload& work, const LoopOptions& options)
      : work_(work),
        options_(options),
        optimizer_(adamw(*work.network)),
        amp_(amp_of(options)),
        accumulator_(options.window) {}

  void step(std::int64_t i) {
    if (backward(i)) frugal::update(optimizer_, amp_, accumulator_, fused_);
  }
  void forward_backward(std::int64_t i) {
    if (backward(i)) accumulator_.finish();
    optimizer_.zero_grad();
  }
  torch::Tensor loss() const { return loss_; }
  std::string reason() const { return {}; }

 private:
  bool backward(std::int64_t i) {
    bool full = false;
    for (std::int64_t k = 0; k < options_.window; ++k) {
      const auto batch = work_.at(i * options_.window + k);
      loss_ = [&] {
        const auto guard = amp_.autocast();
        return loss_of(*work_.network, batch);
      }();
      full = frugal::backward(loss_, batch.size(), amp_, accumulator_);
    }
    return full;
  }

  Workload& work_;
  LoopOptions options_;
  AdamW optimizer_;
  frugal::AmpPolicy<> amp_;
  frugal::GradAccumulator accumulator_;
  frugal::FusedStep fused_;
  torch::Tensor loss_;
};

}  // namespace bench
