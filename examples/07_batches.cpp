// Batches: mini-batches in an order that is a function of seed and epoch, so that any of them can be the next one.

#include "support/task.hpp"

#include <frugal/batches.hpp>

#include <torch/torch.h>

#include <iostream>

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const frugal::Batches batches(task.train().pixels, task.train().labels,
                                {.batch_size = 64, .seed = 1, .device = task.device});

  for (std::int64_t epoch = 1; epoch <= task.epochs; ++epoch) {
    model->train();
    for (const auto& batch : batches.epoch(epoch)) {
      const auto loss = torch::cross_entropy_loss(model(batch.inputs), batch.targets);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    std::cout << "epoch " << epoch << ": " << task.accuracy(model) << " % right\n";
  }

  return task.check("the network learns, and an epoch goes on where it was left", [&] {
    bool same = true;
    std::int64_t position = 0;
    for (const auto& batch : batches.epoch(1)) {
      const auto rest = batches.epoch(1, position++);
      same = same && (*rest.begin()).inputs.equal(batch.inputs);
    }
    return same && position == batches.size() && task.accuracy(model) > 90;
  });
}
