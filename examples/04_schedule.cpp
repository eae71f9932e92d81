// Schedule: the learning rate as a function of the step, here a warm-up and half a cosine wave.

#include "support/reference.hpp"
#include "support/task.hpp"

#include <frugal/schedule.hpp>

#include <torch/torch.h>

#include <cmath>
#include <iostream>
#include <numbers>

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(64);
  const std::int64_t total = task.epochs * ((task.train().size() + 63) / 64), rising = total / 10;
  frugal::Schedule schedule(frugal::warmup(rising, frugal::cosine(total - rising)));
  std::int64_t step = 0;
  schedule.apply(optimizer, step);

  for (std::int64_t epoch = 1; epoch <= task.epochs; ++epoch) {
    model->train();
    for (const auto& batch : *loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      schedule.apply(optimizer, ++step);
    }
    std::cout << "epoch " << epoch << ": " << task.accuracy(model) << " % right, learning rate "
              << optimizer.param_groups()[0].options().get_lr() << '\n';
  }

  return task.check("the rates are those of the formula", [&] {
    const auto by_hand = examples::reference(task, 64, [&](auto&, auto& plain, std::int64_t now) {
      const double done = double(now - rising) / double(total - rising);
      const double rate = now < rising ? double(now + 1) / double(rising) : (1 + std::cos(std::numbers::pi * done)) / 2;
      plain.param_groups()[0].options().set_lr(0.05 * rate);
    });
    return examples::distance(model, by_hand) < 1e-5;
  });
}
