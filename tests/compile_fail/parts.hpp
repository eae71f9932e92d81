#pragma once

#include <frugal/early_stopper.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/trainer.hpp>

#include <cstdint>
#include <optional>
#include <vector>

/// What a Trainer needs, in a few lines and without tensors.
struct Net { double weight = 0; };
struct Loss {
  void backward() const {}
  Loss operator*(double) const { return {}; }
};
struct Optimizer {
  void step() {}
  void zero_grad() {}
};
struct Lbfgs {  // needs a closure
  void step(auto&& closure) { closure(); }
  void zero_grad() {}
};
struct Batch {
  std::int64_t size() const { return 1; }
};

struct Precision {
  static constexpr frugal::Role role = frugal::Role::precision;
  static constexpr bool can_skip = true;
  int autocast() { return 0; }
  auto& scale(auto& loss) { return loss; }
  void unscale(auto&, double) {}
  bool step(auto& optimizer) { return optimizer.step(), true; }
};
struct Clip {
  static constexpr frugal::Role role = frugal::Role::clipping;
  void clip(auto&) {}
};
struct Fused {
  static constexpr frugal::Role role = frugal::Role::update;
  void step(auto& optimizer) { optimizer.step(); }
};
struct Rate {
  static constexpr frugal::Role role = frugal::Role::schedule;
  void apply(auto&, std::int64_t) {}
};
struct Average {
  static constexpr frugal::Role role = frugal::Role::averaging;
  void update(auto&) {}
  void swap(auto&) {}
  bool averaging() const { return false; }
  bool swapped() const { return false; }
};
struct Checkpoints {
  static constexpr frugal::Role role = frugal::Role::checkpointing;
  bool due(const frugal::Progress&) const { return false; }
  void save(const frugal::Progress&, auto&, auto&, auto&...) {}
  std::optional<frugal::Progress> restore(auto&, auto&, auto&...) { return {}; }
  void wait() {}
};
struct Interruption {
  static constexpr frugal::Role role = frugal::Role::interruption;
  bool requested() const { return false; }
};

inline Net net;
inline Optimizer optimizer;
inline Lbfgs lbfgs;
inline std::vector<Batch> batches(1);
inline auto loss = [](Net&, const Batch&) { return Loss{}; };
