// GradClip: no step is larger than the gradient limit allows, and nothing waits for a device to know the norm.

#include "support/reference.hpp"
#include "support/task.hpp"

#include <frugal/grad_clip.hpp>

#include <torch/torch.h>

#include <iostream>

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(64);
  frugal::GradClip clip(1.0);

  for (std::int64_t epoch = 1; epoch <= task.epochs; ++epoch) {
    model->train();
    for (const auto& batch : *loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      loss.backward();
      clip.clip(optimizer);
      optimizer.step();
      optimizer.zero_grad();
    }
    std::cout << "epoch " << epoch << ": " << task.accuracy(model) << " % right, gradient norm " << clip.norm() << '\n';
  }

  return task.check("it trains as LibTorch's clip_grad_norm_ does, but for rounding", [&] {
    const auto clipped = examples::reference(
        task, 64, [](auto& reference, auto&&...) { torch::nn::utils::clip_grad_norm_(reference->parameters(), 1.0); });
    return examples::distance(model, clipped) < 1e-4;
  });
}
