// StateGuard: try something out, here which learning rate is too large, and train as if nothing had happened.

#include "support/reference.hpp"
#include "support/task.hpp"

#include <frugal/state_guard.hpp>

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
  double rate = 1e-3, loss_at_the_end = 0;

  do {
    const frugal::StateGuard guard(model, optimizer);  // weights, momentum, rates and random numbers of now come back
    optimizer.param_groups()[0].options().set_lr(rate *= 4);
    for (const auto& batch : *loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    loss_at_the_end = task.loss(model);
    std::cout << "rate " << rate << ": validation loss " << loss_at_the_end << " after an epoch\n";
  } while (loss_at_the_end < std::log(10.0) && rate < 1e3);  // worse than guessing
  std::cout << rate << " is too large\n";

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

  return task.check("a rate was found, and training went on as if nobody had searched", [&] {
    return rate > 0.05 && rate < 1e3 && examples::distance(model, examples::reference(task, 64)) == 0;
  });
}
