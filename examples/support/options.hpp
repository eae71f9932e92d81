#pragma once

#include <frugal/capability.hpp>

#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

namespace examples {

// What every job can be told.
struct JobOptions {
  std::int64_t batch = 128;
  std::int64_t micro_batch = 0;  // 0: as many as fit
  std::optional<frugal::Precision> precision;
  torch::Device device = torch::kCPU;
  int threads = 0;  // 0: as many as LibTorch takes, all cores
  std::uint64_t seed = 1;
  std::filesystem::path directory;
  bool smoke = false;
};

// Adds the options of every job to those that `app` has, and parses. Ends the program for --help, and with a message
// for what it does not understand.
inline void parse(CLI::App& app, JobOptions& job, int argc, char** argv) {
  const std::map<std::string, std::optional<frugal::Precision>> precisions = {
      {"auto", {}},
      {"fp32", frugal::Precision::fp32},
      {"tf32", frugal::Precision::tf32},
      {"bf16", frugal::Precision::bf16},
      {"fp16", frugal::Precision::fp16},
      {"bit-exact", frugal::Precision::bit_exact}};
  std::string precision = "auto", device = "auto";

  app.add_option("--batch", job.batch, "samples behind one optimizer step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--micro-batch", job.micro_batch, "samples at once; 0: as many as fit into memory, which is tried")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--precision", precision, "how the model computes; auto: as the hardware does it best")
      ->check(CLI::IsMember({"auto", "fp32", "tf32", "bf16", "fp16", "bit-exact"}))
      ->capture_default_str();
  app.add_option("--device", device, "cpu, cuda, cuda:1 ...; auto: cuda where there is one")->capture_default_str();
  app.add_option("--threads", job.threads,
                 "CPU threads; 0: all cores. Fewer are faster where other programs keep the cores busy")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--seed", job.seed, "the same seed gives the same result on the same machine")->capture_default_str();
  app.add_option("--directory", job.directory,
                 "where the run is kept, so that the same command continues it after Ctrl-C, SIGTERM or a crash; "
                 "nothing is written without it");
  app.add_flag("--smoke", job.smoke, "a tiny run on built-in data: checks that the program works");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) { std::exit(app.exit(error)); }

  if (job.threads > 0) torch::set_num_threads(job.threads);
  job.precision = precisions.at(precision);
  job.device = device != "auto" ? torch::Device(device) : torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
}

}  // namespace examples
