// The loop that the other examples start from, in plain LibTorch: a small network learns to tell ten kinds of clothes
// apart. Each of them differs from this one by a single policy: compare them side by side.

#include "support/task.hpp"

#include <torch/torch.h>

#include <iostream>

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(64);

  for (std::int64_t epoch = 1; epoch <= task.epochs; ++epoch) {
    model->train();
    for (const auto& batch : *loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    std::cout << "epoch " << epoch << ": " << task.accuracy(model) << " % right\n";
  }

  return task.check("the network learns", [&] { return task.accuracy(model) > 90; });
}
