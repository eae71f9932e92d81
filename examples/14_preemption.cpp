// Preemption: SIGTERM or Ctrl-C ends the run at the next batch with everything saved, and exit code 75, which means "start me
// again". The same command then goes on in the middle of the epoch, and of the window, to the same weights.

#include "support/reference.hpp"
#include "support/task.hpp"

#include <frugal/batches.hpp>
#include <frugal/checkpoint_manager.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/preemption.hpp>
#include <frugal/update.hpp>

#include <torch/torch.h>

#include <csignal>
#include <filesystem>
#include <iostream>
#include <optional>

// Trains in `directory` until it is done, or asked to stop. Everything with state goes to save() and to restore().
std::optional<examples::Net> train(const examples::Task& task, const std::filesystem::path& directory,
                                   const frugal::Preemption& preemption, auto&& after_batch) {
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const frugal::Batches batches(task.train().pixels, task.train().labels,
                                {.batch_size = 64, .micro_batch = 32, .seed = 1, .device = task.device});
  frugal::GradAccumulator accumulator(batches.steps());
  frugal::CheckpointManager checkpoints({.directory = directory});
  auto at = checkpoints.restore(model, optimizer, accumulator).value_or(frugal::Progress{});

  while (at.epoch < task.epochs) {
    model->train();
    for (const auto& batch : batches.epoch(at.epoch, at.micro_batch)) {
      const auto loss = torch::cross_entropy_loss(model(batch.inputs), batch.targets);
      if (accumulator.backward(loss, batch.size())) frugal::update(optimizer, accumulator), ++at.step;
      ++at.micro_batch;
      after_batch(at);
      if (!preemption.requested()) continue;
      checkpoints.save(at, model, optimizer, accumulator);  // the open window's gradients are in it
      checkpoints.wait();                                   // until it is on the disk
      return {};
    }
    if (accumulator.pending()) frugal::update(optimizer, accumulator), ++at.step;
    ++at.epoch;
    at.micro_batch = 0;
    std::cout << "epoch " << at.epoch << ": " << task.accuracy(model) << " % right\n";
    if (checkpoints.due(at)) checkpoints.save(at, model, optimizer, accumulator);
  }
  return model;
}

int main(int argc, char** argv) {
  frugal::Preemption preemption;  // first: a signal during the set-up is heard too
  const examples::Task task(argc, argv);
  if (!task.smoke()) return train(task, "runs/example-14", preemption, [](const auto&) {}) ? 0 : 75;

  const std::filesystem::path directory = "checkpoints-of-example-14";
  std::filesystem::remove_all(directory);
  const auto reclaimed = [](const frugal::Progress& at) {
    if (at.epoch == 1 && at.micro_batch == 3) std::raise(SIGTERM);  // the machine is wanted by somebody else
  };
  const bool ended_early = !train(task, directory, preemption, reclaimed);
  preemption.reset();
  const auto model = train(task, directory, preemption, [](const auto&) {});
  const auto undisturbed = train(task, {}, preemption, [](const auto&) {});  // no directory: nothing is saved
  std::filesystem::remove_all(directory);
  return task.check("a run that was interrupted inside a window ends as one that was not", [&] {
    return ended_early && model && undisturbed && examples::distance(*model, *undisturbed) == 0;
  });
}
