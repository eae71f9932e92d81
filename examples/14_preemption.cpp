// Preemption: SIGTERM or Ctrl-C ends the run at the next batch, with exit code 75, which means "start me again".

#include "support/task.hpp"

#include <frugal/preemption.hpp>

#include <torch/torch.h>

#include <csignal>
#include <iostream>

int main(int argc, char** argv) {
  const frugal::Preemption preemption;
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(64);
  std::int64_t epoch = 1;

  for (; epoch <= task.epochs && !preemption.requested(); ++epoch) {
    model->train();
    for (const auto& batch : *loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      if (preemption.requested()) break;
    }
    std::cout << "epoch " << epoch << ": " << task.accuracy(model) << " % right\n";
    if (task.smoke() && epoch == 2) std::raise(SIGTERM);  // the machine is wanted by somebody else
  }
  if (preemption.requested()) std::cout << "interrupted: save here\n";

  const int failed =
      task.check("the signal ends the loop, not the program", [&] { return preemption.requested() && epoch == 3; });
  return failed || task.smoke() ? failed : preemption.requested() ? 75 : 0;
}
