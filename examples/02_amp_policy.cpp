// AmpPolicy: the forward pass in the precision that this hardware computes fastest, the weights in full precision.

#include "support/reference.hpp"
#include "support/task.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/update.hpp>

#include <torch/torch.h>

#include <cmath>
#include <iostream>

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(64);
  frugal::AmpPolicy<frugal::Auto> amp(task.device);
  std::cout << "precision: " << amp.reason() << '\n';

  for (std::int64_t epoch = 1; epoch <= task.epochs; ++epoch) {
    model->train();
    for (const auto& batch : *loader) {
      const auto loss = [&] {
        const auto guard = amp.autocast();  // ends with the loss: backward needs none
        return torch::cross_entropy_loss(model(batch.data), batch.target);
      }();
      amp.scale(loss).backward();
      amp.step(optimizer);  // skips the step when a float16 gradient overflowed
      optimizer.zero_grad();
    }
    std::cout << "epoch " << epoch << ": " << task.accuracy(model) << " % right\n";
  }

  return task.check("it learns what full precision learns", [&] {
    examples::Net full = examples::reference(task, 64);
    return std::abs(task.accuracy(model) - task.accuracy(full)) < 3;
  });
}
