#pragma once

#include <frugal/batch_size_prober.hpp>
#include <frugal/checkpoint_manager.hpp>
#include <frugal/policy.hpp>
#include <frugal/run.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <string>

// What the large examples say about a run.
namespace examples {

// How the samples of an optimizer step are cut: as the user wants it, else as `probe()` finds out.
inline frugal::BatchPlan plan(std::int64_t batch, std::int64_t micro_batch, auto&& probe) {
  const auto whole_steps = [&](std::int64_t size) { return (batch + size - 1) / size; };
  const frugal::BatchPlan plan = micro_batch > 0 ? frugal::BatchPlan{std::min(micro_batch, batch),
                                                                     whole_steps(std::min(micro_batch, batch)), batch}
                                                 : probe();
  std::cout << "batch:        " << batch << " samples in " << plan.steps << " x " << plan.micro_batch
            << (micro_batch > 0 ? ", as asked for" : ", the most that fits") << std::endl;
  return plan;
}

inline std::string place(const frugal::Progress& at) {
  return "epoch " + std::to_string(at.epoch) + ", step " + std::to_string(at.step);
}

// The line about checkpoints. `start`: where this part of the run began.
inline void describe_checkpoints(const frugal::CheckpointManager<>& checkpoints, const frugal::Progress& start) {
  const auto files = checkpoints.list().size();
  std::cout << "checkpoints:  ";
  if (files == 0) std::cout << "none; --directory keeps a run";
  else std::cout << files << (files == 1 ? " file" : " files");
  if (start.samples > 0) std::cout << ", resumed at " << place(start);
  std::cout << '\n';
}

// What a run that was interrupted says. Back in a hurry: somebody wants the machine.
inline int interrupted(const frugal::RunReport& report, const std::filesystem::path& directory) {
  std::cout << "interrupted after " << place(report.progress)
            << (directory.empty() ? "; without --directory nothing is kept" : "; the same command continues")
            << std::endl;
  return report.exit_code();
}

}  // namespace examples
