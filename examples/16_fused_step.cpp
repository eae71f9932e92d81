// FusedStep: the optimizer's step in one pass over the memory, on the state of LibTorch's own optimizer.

#include "support/reference.hpp"
#include "support/task.hpp"

#include <frugal/fused_step.hpp>

#include <torch/torch.h>

#include <iostream>

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(64);
  frugal::FusedStep fused;

  for (std::int64_t epoch = 1; epoch <= task.epochs; ++epoch) {
    model->train();
    for (const auto& batch : *loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      loss.backward();
      fused.step(optimizer);
      optimizer.zero_grad();
    }
    std::cout << "epoch " << epoch << ": " << task.accuracy(model) << " % right, stepped by " << fused.reason() << '\n';
  }

  return task.check("the kernels ran, and the weights are those of optimizer.step()", [&] {
    return fused.reason() == "fused kernels" && examples::distance(model, examples::reference(task, 64)) < 1e-5;
  });
}
