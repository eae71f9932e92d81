// calibrate: which precision is the fastest for this model on this machine, by measuring instead of by rule.

#include "support/reference.hpp"
#include "support/task.hpp"

#include <frugal/calibration.hpp>
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

  const auto train_on = [&](const auto& batch) {
    const auto loss = [&] {
      const auto guard = amp.autocast();
      return torch::cross_entropy_loss(model(batch.data), batch.target);
    }();
    if (frugal::backward(loss, batch.data.size(0), amp)) frugal::update(optimizer, amp);
  };

  const auto first = *loader->begin();
  const auto found = frugal::calibrate(amp, model, optimizer, [&] { train_on(first); });  // and nothing has happened
  std::cout << "precision: " << found.reason << '\n';

  for (std::int64_t epoch = 1; epoch <= task.epochs; ++epoch) {
    model->train();
    for (const auto& batch : *loader) train_on(batch);
    std::cout << "epoch " << epoch << ": " << task.accuracy(model) << " % right\n";
  }

  return task.check("it learns what full precision learns", [&] {
    examples::Net full = examples::reference(task, 64);
    return std::abs(task.accuracy(model) - task.accuracy(full)) < 3;
  });
}
