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

// What the demo can be told.
struct Options {
  std::int64_t epochs = 10;
  std::int64_t batch = 128;
  std::int64_t micro_batch = 64;
  std::optional<frugal::Precision> precision;
  torch::Device device = torch::kCPU;
  int threads = 1;
  std::uint64_t seed = 1;
  std::string data;
  std::filesystem::path directory;
  bool smoke = false;
};

// Ends the program for --help, and with a message for what it does not understand.
inline Options parse(int argc, char** argv) {
  const std::map<std::string, std::optional<frugal::Precision>> precisions = {
      {"auto", {}},
      {"fp32", frugal::Precision::fp32},
      {"tf32", frugal::Precision::tf32},
      {"bf16", frugal::Precision::bf16},
      {"fp16", frugal::Precision::fp16},
      {"bit-exact", frugal::Precision::bit_exact}};
  Options options;
  std::string precision = "auto", device = "auto";

  CLI::App app("Trains a small network on Fashion-MNIST with every policy at work, and reports what each of them did.");
  app.add_option("--epochs", options.epochs, "epochs at most")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--batch", options.batch, "samples behind one optimizer step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--micro-batch", options.micro_batch, "samples at once; the memory of the run depends on it")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--precision", precision, "how the model computes; auto: as the hardware does it best")
      ->check(CLI::IsMember({"auto", "fp32", "tf32", "bf16", "fp16", "bit-exact"}))
      ->capture_default_str();
  app.add_option("--device", device, "cpu, cuda, cuda:1 ...; auto: cuda where there is one")->capture_default_str();
  app.add_option("--threads", options.threads,
                 "of the CPU; 0: as LibTorch chooses. More than one gain little on a network this small, and lose much "
                 "where other programs run")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--seed", options.seed, "the same seed gives the same result on the same machine")
      ->capture_default_str();
  app.add_option("--data", options.data,
                 "the folder with the four files of Fashion-MNIST, .gz or unpacked; else "
                 "FRUGAL_DATA, else where the Debian package dataset-fashion-mnist puts them");
  app.add_option("--directory", options.directory, "where epochs.csv goes; nothing is written without it");
  app.add_flag("--smoke", options.smoke, "synthetic images and a few epochs: checks that the program works");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) { std::exit(app.exit(error)); }

  options.precision = precisions.at(precision);
  options.device = device != "auto" ? torch::Device(device) : torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  if (options.threads > 0) torch::set_num_threads(options.threads);
  if (options.smoke) options.epochs = 4;
  return options;
}

}  // namespace examples
