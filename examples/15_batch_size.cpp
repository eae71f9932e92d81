// BatchSizeProber: the batch size that you want, in as few pieces as fit into the memory of this machine.

#include "support/task.hpp"

#include <frugal/batch_size_prober.hpp>
#include <frugal/batches.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/update.hpp>

#include <torch/torch.h>

#include <iostream>
#include <new>

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loss = [](examples::Net& net, const frugal::Batch& batch) {
    return torch::cross_entropy_loss(net(batch.inputs), batch.targets);
  };
  const auto sample = [&](std::int64_t n) {
    if (task.smoke() && n > 20) throw std::bad_alloc();  // a machine with little memory
    return frugal::Batch{task.train().pixels.narrow(0, 0, n), task.train().labels.narrow(0, 0, n)};
  };
  const auto weights = [&] { return torch::nn::utils::parameters_to_vector(model->parameters()); };
  const auto before = weights();
  const auto plan = frugal::BatchSizeProber({.max = task.train().size()}).plan(64, model, optimizer, sample, loss);
  const bool untouched = weights().equal(before);  // the trials trained, and left no trace
  std::cout << "64 samples in " << plan.steps << " x " << plan.micro_batch << '\n';

  const frugal::Batches batches(task.train().pixels, task.train().labels,
                                {.batch_size = 64, .micro_batch = plan.micro_batch, .device = task.device});
  frugal::GradAccumulator accumulator(plan.steps);
  for (std::int64_t epoch = 1; epoch <= task.epochs; ++epoch) {
    model->train();
    for (const auto& batch : batches.epoch(epoch))
      if (accumulator.backward(loss(model, batch), batch.size())) frugal::update(optimizer, accumulator);
    if (accumulator.pending()) frugal::update(optimizer, accumulator);
    std::cout << "epoch " << epoch << ": " << task.accuracy(model) << " % right\n";
  }

  return task.check("the plan fits, makes exactly the batch, and cost the model nothing", [&] {
    return plan.steps == 4 && plan.micro_batch == 16 && untouched && task.accuracy(model) > 90;
  });
}
