// Averager: validation, and the model that you ship, use the average of the last weights, which is less noisy.

#include "support/reference.hpp"
#include "support/task.hpp"

#include <frugal/averager.hpp>

#include <torch/torch.h>

#include <iostream>

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(64);
  frugal::Averager average({.decay = 0.99});
  double averaged = 0;

  for (std::int64_t epoch = 1; epoch <= task.epochs; ++epoch) {
    model->train();
    for (const auto& batch : *loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      average.update(model);
    }
    std::cout << "epoch " << epoch << ": " << task.accuracy(model) << " % right";
    average.swap(model);  // the average into the model, the weights out of it
    averaged = task.accuracy(model);
    average.swap(model);  // and back, bit for bit
    std::cout << ", averaged " << averaged << " %\n";
  }

  return task.check("the average is good, and training goes on as if nobody averaged",
                    [&] { return averaged > 90 && examples::distance(model, examples::reference(task, 64)) == 0; });
}
