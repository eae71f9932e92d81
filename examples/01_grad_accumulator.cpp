// GradAccumulator: the gradient of a batch of 64 with the memory of a batch of 16.

#include "support/reference.hpp"
#include "support/task.hpp"

#include <frugal/grad_accumulator.hpp>
#include <frugal/update.hpp>

#include <torch/torch.h>

#include <iostream>

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(16);
  frugal::GradAccumulator accumulator(4);

  for (std::int64_t epoch = 1; epoch <= task.epochs; ++epoch) {
    model->train();
    for (const auto& batch : *loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      if (accumulator.backward(loss, batch.data.size(0))) frugal::update(optimizer, accumulator);
    }
    if (accumulator.pending()) frugal::update(optimizer, accumulator);  // the last window of an epoch may be shorter
    std::cout << "epoch " << epoch << ": " << task.accuracy(model) << " % right\n";
  }

  return task.check("4 x 16 samples train as 64 do",
                    [&] { return examples::distance(model, examples::reference(task, 64)) < 1e-5; });
}
