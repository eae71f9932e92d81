#pragma once

#include "task.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace examples {

// The loop of 00_hand_loop.cpp as a function, for claims such as "the same as plain LibTorch with clip_grad_norm_".
inline Net reference(const Task& task, std::size_t batch_size, auto&& before_step) {
  torch::manual_seed(1);
  Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(batch_size);
  std::int64_t step = 0;

  for (std::int64_t epoch = 1; epoch <= task.epochs; ++epoch) {
    model->train();
    for (const auto& batch : *loader) {
      torch::cross_entropy_loss(model(batch.data), batch.target).backward();
      before_step(model, optimizer, step);
      optimizer.step();
      optimizer.zero_grad();
      ++step;
    }
  }
  return model;
}
inline Net reference(const Task& task, std::size_t batch_size) {
  return reference(task, batch_size, [](auto&&...) {});
}

// The largest difference between the weights of two models.
inline double distance(const Net& one, const Net& other) {
  const torch::NoGradGuard no_grad;
  const auto mine = one->parameters(), theirs = other->parameters();
  double largest = 0;
  for (std::size_t i = 0; i < mine.size(); ++i)
    largest = std::max(largest, mine[i].sub(theirs[i]).abs().max().item<double>());
  return largest;
}

}  // namespace examples
