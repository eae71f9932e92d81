// EarlyStopper: training ends when three checks in a row brought nothing, instead of after a number of epochs.

#include "support/task.hpp"

#include <frugal/early_stopper.hpp>
#include <frugal/run.hpp>

#include <torch/torch.h>

#include <iostream>

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(64);
  frugal::EarlyStopper stopper({.patience = 3, .goal = frugal::Goal::maximize});

  for (std::int64_t epoch = 1; epoch <= 100; ++epoch) {
    model->train();
    for (const auto& batch : *loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const double accuracy = task.accuracy(model);
    std::cout << "epoch " << epoch << ": " << accuracy << " % right\n";
    if (stopper.observe(accuracy) == frugal::Verdict::stop) break;
  }
  std::cout << "stopped for " << to_string(stopper.reason()) << ", the best epoch was " << stopper.best_at() + 1
            << '\n';

  return task.check("it stops at a plateau", [&] { return stopper.reason() == frugal::StopReason::plateau; });
}
