#pragma once

#include <torch/nn/module.h>

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

  // train(mode) recurses: parents come before children. A child of two parents is listed under each of them.
  void restore() {
    if (!root_) return;
    set(*root_, root_training_);
    for (auto& [module, training] : children_) set(*module, training);
  }

 private:
  static void set(torch::nn::Module& module, bool training) {
    if (module.is_training() != training) module.train(training);
  }

  torch::nn::Module* root_ = nullptr;
  bool root_training_ = false;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> children_;
};

}  // namespace frugal::inline v0::detail
