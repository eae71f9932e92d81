#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// Which modules are in training mode.
class GuardedModes {
 public:
  GuardedModes() = default;
  // The root may live anywhere, its children are owned by shared pointers.
  explicit GuardedModes(torch::nn::Module& root) : root_(&root), root_training_(root.is_training()) {
    for (auto& module : root.modules(/*include_self=*/false)) {
      const bool training = module->is_training();
      children_.emplace_back(std::move(module), training);
    }
  }

  // train(mode) recurses: parents come before children. A child of two parents may be changed by the second one after
  // its turn, so it takes as many rounds as nothing is left to do, bounded for modules that insist on a mode of their
  // own.
  void restore() {
    if (!root_) return;
    bool again = true;
    for (std::size_t round = 0; again && round <= children_.size(); ++round) {
      again = set(*root_, root_training_);
      for (auto& [module, training] : children_) again = set(*module, training) || again;
    }
  }

 private:
  static bool set(torch::nn::Module& module, bool training) {
    if (module.is_training() == training) return false;
    module.train(training);
    return true;
  }

  torch::nn::Module* root_ = nullptr;
  bool root_training_ = false;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> children_;
};

}  // namespace frugal::inline v0::detail
