// Observers: the Trainer runs the same loop, and callables look at it. Model and result are those of the hand loop.

#include "support/reference.hpp"
#include "support/task.hpp"

#include <frugal/console.hpp>
#include <frugal/observers.hpp>
#include <frugal/trainer.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <iostream>

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(64);
  std::int64_t epochs = 0, steps = 0;
  auto largest = torch::zeros({}, task.device);

  const auto loss = [](examples::Net& net, const torch::data::Example<>& batch) {
    return torch::cross_entropy_loss(net(batch.data), batch.target);
  };
  frugal::Trainer trainer{
      model,
      optimizer,
      loss,
      frugal::OnGradients{[&](examples::Net& net) {  // before every step; stays on the device, nothing waits for it
        for (const auto& weights : net->parameters()) largest = torch::max(largest, weights.grad().abs().max());
      }},
      frugal::OnStep{[&](const frugal::Progress& at) { steps = at.step; }},  // `, 100` behind the callable: every 100th
      frugal::OnEpoch{[&](const frugal::Progress& at, const frugal::Readings& now) {
        epochs = at.epoch;
        for (const auto& [name, value] : now) std::cout << name << ' ' << value << '\n';
      }},
      frugal::ProgressBar({.epochs = task.epochs})};
  trainer.fit(*loader, [&] { return frugal::Metrics{{"accuracy", task.accuracy(model)}}; }, {.epochs = task.epochs});
  std::cout << steps << " steps, largest gradient " << largest.item<double>() << '\n';

  return task.check("the hooks were called, and the Trainer's loop is the hand loop", [&] {
    return epochs == task.epochs && steps == trainer.progress().step && largest.item<double>() > 0 &&
           examples::distance(model, examples::reference(task, 64)) == 0;
  });
}
