#pragma once

#include "support/catch.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/averager.hpp>
#include <frugal/console.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/grad_clip.hpp>
#include <frugal/schedule.hpp>
#include <frugal/trainer.hpp>

#include <cstdint>
#include <functional>
#include <tuple>

/// The registry of policies: whoever is listed in All is held to the contract of a policy (contract_test.cpp).
namespace registry {

/// What a policy may be used on.
struct Loop {
  torch::nn::Linear model{3, 2};
  torch::optim::SGD optimizer{model->parameters(), 0.1};

  torch::Tensor loss() { return model(torch::ones({4, 3})).square().mean(); }
};

/// `make()` gives a new one; `use(policy, loop)` brings it into a state that a new one is not in, if it has any state.
template <class Policy>
struct Sample;

template <class Tag>
struct Sample<frugal::AmpPolicy<Tag>> {
  static constexpr frugal::Role role = frugal::Role::precision;
  static auto make() {
    return frugal::AmpPolicy<Tag>(at::kCPU, frugal::Capability{.device = at::kCPU, .cpu_bf16 = true, .cpu_fp16 = true});
  }
  static void use(frugal::AmpPolicy<Tag>& amp, Loop& loop) {
    amp.scale(loop.loss()).backward();
    for (auto& parameter : loop.model->parameters()) parameter.mutable_grad().fill_(1.0 / 0.0);
    amp.unscale(loop.optimizer);
    amp.step(loop.optimizer);
  }
};
template <>
struct Sample<frugal::GradAccumulator> {
  static constexpr frugal::Role role = frugal::Role::accumulation;
  static auto make() { return frugal::GradAccumulator(3); }
  static void use(frugal::GradAccumulator& accumulator, Loop& loop) { (void)accumulator.backward(loop.loss(), 4); }
};
template <>
struct Sample<frugal::GradClip> {
  static constexpr frugal::Role role = frugal::Role::clipping;
  static auto make() { return frugal::GradClip(0.5); }
  static void use(frugal::GradClip& clip, Loop& loop) { loop.loss().backward(), clip.clip(loop.optimizer); }
};
template <>
struct Sample<frugal::Schedule> {
  static constexpr frugal::Role role = frugal::Role::schedule;
  static auto make() { return frugal::Schedule(frugal::step_decay(2)); }
  static void use(frugal::Schedule& schedule, Loop& loop) { schedule.apply(loop.optimizer, 4); }
};
template <>
struct Sample<frugal::ReduceOnPlateau> {
  static constexpr frugal::Role role = frugal::Role::schedule;
  static auto make() { return frugal::ReduceOnPlateau({.patience = 0}); }
  static void use(frugal::ReduceOnPlateau& schedule, Loop& loop) {
    schedule.observe(1.0), schedule.observe(2.0), schedule.apply(loop.optimizer, 1);
  }
};
template <>
struct Sample<frugal::Averager> {
  static constexpr frugal::Role role = frugal::Role::averaging;
  static auto make() { return frugal::Averager({.decay = 0.5}); }
  static void use(frugal::Averager& averager, Loop& loop) { averager.update(loop.model), averager.update(loop.model); }
};
template <>
struct Sample<frugal::EarlyStopper> {
  static constexpr frugal::Role role = frugal::Role::stopping;
  static auto make() { return frugal::EarlyStopper({.patience = 1, .smoothing = 0.5}); }
  static void use(frugal::EarlyStopper& stopper, Loop&) { stopper.observe(1.0), stopper.observe(2.0); }
};

template <>
struct Sample<frugal::ProgressBar> {
  static constexpr frugal::Role role = frugal::Role::observer;
  static auto make() { return frugal::ProgressBar({.stream = nullptr}); }
  static void use(frugal::ProgressBar&, Loop&) {}
};

using All =
    std::tuple<frugal::AmpPolicy<frugal::Auto>, frugal::AmpPolicy<frugal::Fp32>, frugal::AmpPolicy<frugal::Tf32>,
               frugal::AmpPolicy<frugal::Bf16>, frugal::AmpPolicy<frugal::Fp16>, frugal::AmpPolicy<frugal::BitExact>,
               frugal::GradAccumulator, frugal::GradClip, frugal::Schedule, frugal::ReduceOnPlateau, frugal::Averager,
               frugal::EarlyStopper, frugal::ProgressBar>;

}  // namespace registry
