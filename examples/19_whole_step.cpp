// All that makes a step, in a loop of your own: a measured precision, four micro-batches per step, clipping, the fused step, an
// average. backward() and update() call the policies in the right order; their own verbs are for one alone.

#include "support/reference.hpp"
#include "support/task.hpp"

#include <frugal/allocator.hpp>
#include <frugal/averager.hpp>
#include <frugal/calibration.hpp>
#include <frugal/fused_step.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/grad_clip.hpp>
#include <frugal/update.hpp>

#include <torch/torch.h>

#include <cmath>
#include <iostream>

int main(int argc, char** argv) {
  std::cout << "allocator: " << to_string(frugal::tune_allocator()) << '\n';  // before the first big tensor
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(16);

  // lagged: says something in fp16 alone, where the host then never waits for the device
  frugal::AmpPolicy<> amp(task.device, {.skip_decision = frugal::SkipDecision::lagged});
  frugal::GradAccumulator accumulator(4);
  frugal::GradClip clip(5.0);
  frugal::FusedStep fused;
  frugal::Averager average({.decay = 0.9});
  std::int64_t applied = 0, skipped = 0;

  const auto count = [&](frugal::StepResult result) {
    if (result == frugal::StepResult::applied) ++applied, average.update(model);
    else ++skipped;
  };
  // The answer of the last update, where it was not known at once.
  const auto settle = [&] {
    const auto last = frugal::settle(optimizer, amp, fused);
    if (last != frugal::StepResult::accumulated) count(last);
  };
  const auto update = [&] {
    settle();
    const auto result = frugal::update(optimizer, amp, accumulator, clip, fused);
    if (!amp.unanswered(optimizer)) count(result);
  };
  const auto backward = [&](const auto& batch) {
    const auto loss = [&] {
      const auto guard = amp.autocast();
      return torch::cross_entropy_loss(model(batch.data), batch.target);
    }();
    return frugal::backward(loss, batch.data.size(0), amp, accumulator);
  };

  const auto first = *loader->begin();
  const auto whole_window = [&] {
    while (!backward(first)) {}
    frugal::update(optimizer, amp, accumulator, clip, fused);
  };
  frugal::calibrate(amp, model, optimizer, whole_window);  // and nothing has happened
  std::cout << "precision: " << amp.reason() << '\n';

  for (std::int64_t epoch = 1; epoch <= task.epochs; ++epoch) {
    model->train();
    for (const auto& batch : *loader)
      if (backward(batch)) update();
    if (accumulator.pending()) update();  // the last, shorter window
    settle();                             // before anybody looks
    average.swap(model);
    std::cout << "epoch " << epoch << ": " << task.accuracy(model) << " % right\n";
    if (epoch < task.epochs) average.swap(model);
  }
  std::cout << applied << " steps, " << skipped << " skipped, the last norm was " << clip.norm() << "; "
            << fused.reason() << '\n';

  return task.check("it learns what full precision learns", [&] {
    examples::Net full = examples::reference(task, 64);
    return std::abs(task.accuracy(model) - task.accuracy(full)) < 3;
  });
}
