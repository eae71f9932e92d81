// CheckpointManager: whatever kills the program, started again it goes on where it was, to the same weights.

#include "support/reference.hpp"
#include "support/task.hpp"

#include <frugal/checkpoint_manager.hpp>

#include <torch/torch.h>

#include <filesystem>
#include <iostream>

// Trains in `directory` up to some epoch.
examples::Net train(const examples::Task& task, const std::filesystem::path& directory, std::int64_t epochs) {
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto loader = task.loader(64);
  frugal::CheckpointManager checkpoints({.directory = directory});
  auto at = checkpoints.restore(model, optimizer).value_or(frugal::Progress{});

  while (at.epoch < epochs) {
    model->train();
    for (const auto& batch : *loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    ++at.epoch;
    std::cout << "epoch " << at.epoch << ": " << task.accuracy(model) << " % right\n";
    checkpoints.save(at, model, optimizer);  // copies the state; a thread of its own writes it
  }
  return model;
}

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  const std::filesystem::path directory = "checkpoints-of-example-09";
  std::filesystem::remove_all(directory);
  train(task, directory, 1);  // and here the program might have been killed
  const examples::Net model = train(task, directory, task.epochs);
  std::filesystem::remove_all(directory);

  return task.check("a run in two parts is a run in one",
                    [&] { return examples::distance(model, examples::reference(task, 64)) == 0; });
}
