// Everything at once, on real data: every policy at work in one Trainer, and what each of them did. See --help.
//
//     example_10_trainer --directory runs/fashion     may be interrupted at any moment; the same command continues

#include "support/epoch_log.hpp"
#include "support/fashion_mnist.hpp"
#include "support/job.hpp"
#include "support/net.hpp"
#include "support/options.hpp"
#include "support/phase_timer.hpp"

#include <frugal/frugal.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>
#include <utility>

using Amp = frugal::AmpPolicy<frugal::Auto>;
using frugal::Preemption, frugal::Progress, frugal::RunReport, frugal::StopReason;
constexpr double full_rate = 2e-3, max_norm = 1.0;

struct Options : examples::JobOptions {
  std::int64_t epochs = 10;
  std::int64_t patience = 3;
  std::string data;
  bool synthetic = false;
};

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("Trains a small network on Fashion-MNIST with every policy at work, and reports what each of them did.");
  app.add_option("--epochs", options.epochs, "epochs at most")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--patience", options.patience, "epochs in a row without progress that end the run")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--data", options.data,
                 "the folder with the four files of Fashion-MNIST, .gz or unpacked; else "
                 "FRUGAL_DATA, else where the Debian package dataset-fashion-mnist puts them");
  app.add_flag("--synthetic", options.synthetic, "a few made-up images instead of Fashion-MNIST");
  examples::parse(app, options, argc, argv);
  if (options.smoke) options.epochs = 4;
  if (options.smoke || options.synthetic) torch::set_num_threads(1);  // small tensors, and tests run side by side
  return options;
}

struct Result {
  RunReport report;
  double accuracy = 0;  // on the test images, in percent; of a run that is over
};

// One line about each policy.
void describe(auto& trainer, const frugal::Batches<>& batches, const RunReport& report, const Progress& start,
              auto&& rate) {
  const Progress& at = report.progress;
  const auto& stopper = trainer.template get<frugal::EarlyStopper>();
  double lowest = rate(0), highest = rate(0);
  for (std::int64_t step = 1; step < at.step; ++step) {  // a schedule is a pure function: it can be asked again
    lowest = std::min(lowest, rate(step));
    highest = std::max(highest, rate(step));
  }

  std::cout << "precision:    " << trainer.template get<Amp>().reason() << '\n'
            << "accumulation: " << at.step + at.skipped << " windows of up to " << batches.steps() << " x "
            << batches.micro_batch() << " samples, " << at.step << " steps, " << at.skipped << " skipped\n"
            << "schedule:     learning rates from " << full_rate * lowest << " to " << full_rate * highest << '\n'
            << "averaging:    validated and tested on the averaged weights\n"
            << "stopping:     " << to_string(report.reason) << " after epoch " << at.epoch << "; the best was epoch "
            << stopper.best_at() + 1 << " with " << stopper.best() << " % of the validation images\n";
  examples::describe_checkpoints(trainer.template get<frugal::CheckpointManager<>>(), start);
  if (at.samples == start.samples) {
    std::cout << "This run was over already; another --directory begins a new one.\n";
    return;
  }
  std::cout << "clipping:     the gradient norm may be " << max_norm << " and was "
            << trainer.template get<frugal::GradClip>().norm() << " before the last step\n"
            << "update:       " << trainer.template get<frugal::FusedStep>().reason() << '\n'
            << "seconds:      " << trainer.template get<examples::PhaseTimer>().summary() << '\n';
}

Result train(const Options& options, const examples::Data& data, Preemption preemption) {
  torch::manual_seed(options.seed);
  examples::Net model;
  model->to(options.device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(full_rate));
  const auto loss = [](examples::Net& net, const frugal::Batch& batch) {
    return torch::cross_entropy_loss(net(batch.inputs), batch.targets);
  };
  Amp amp(options.device, {.precision = options.precision});

  const auto plan = examples::plan(options.batch, options.micro_batch, [&] {
    const auto sample = [&](std::int64_t n) {
      return frugal::Batch{data.train.pixels.narrow(0, 0, n).to(options.device),
                           data.train.labels.narrow(0, 0, n).to(options.device)};
    };
    return frugal::BatchSizeProber({.max = data.train.size()}).plan(options.batch, model, optimizer, sample, loss, amp);
  });
  const frugal::Batches batches(
      data.train.pixels, data.train.labels,
      {.batch_size = options.batch, .micro_batch = plan.micro_batch, .seed = options.seed, .device = options.device});
  const std::int64_t steps_per_epoch = (batches.samples() + options.batch - 1) / options.batch;
  const std::int64_t steps = options.epochs * steps_per_epoch, rising = steps / 20;
  const auto rate = frugal::warmup(rising, frugal::cosine(steps - rising));
  const auto checkpoints = options.directory.empty() ? std::filesystem::path() : options.directory / "checkpoints";

  frugal::Trainer trainer{model,
                          optimizer,
                          loss,
                          std::move(amp),
                          frugal::GradAccumulator(plan.steps),
                          frugal::GradClip(max_norm),
                          frugal::FusedStep{},
                          frugal::Schedule(rate),
                          frugal::Averager({.decay = 0.998}),
                          frugal::EarlyStopper({.patience = options.patience, .goal = frugal::Goal::maximize}),
                          frugal::CheckpointManager({.directory = checkpoints, .goal = frugal::Goal::maximize}),
                          std::move(preemption),
                          frugal::ProgressBar({.epochs = options.epochs, .batches_per_epoch = batches.size()}),
                          examples::PhaseTimer{},
                          examples::EpochLog(options.directory)};
  trainer.resume();
  const Progress start = trainer.progress();
  const auto validate = [&] { return examples::accuracy(model, data.validation); };
  const RunReport report = trainer.fit(batches, validate, {.epochs = options.epochs});
  if (report.reason == StopReason::preempted) return {report};

  model->eval();
  const double accuracy = examples::accuracy(model, data.test);
  std::printf("test accuracy: %.1f %%\n", accuracy);
  std::fflush(stdout);
  describe(trainer, batches, report, start, rate);
  return {report, accuracy};
}

// The same seed gives the same network, and a good one, however often the run is interrupted.
void smoke_test(Options options, const examples::Data& data) {
  const auto need = [](bool holds, const char* claim) {
    if (!holds) throw std::runtime_error(std::string("not true: ") + claim);
  };
  const auto same = [](const Result& one, const Result& other) {
    return one.report.progress.loss == other.report.progress.loss && one.accuracy == other.accuracy;
  };
  const Result one = train(options, data, Preemption{});
  need(same(one, train(options, data, Preemption{})), "two runs with the same seed are the same");
  need(one.report.progress.samples == one.report.progress.epoch * data.train.size(),
       "every image is seen once per epoch");
  need(one.accuracy > 90, "the network learns");
  options.micro_batch = options.batch / 2;
  need(train(options, data, Preemption{}).accuracy > 90, "the network learns from accumulated gradients");
}

int main(int argc, char** argv) try {
  const Options options = parse(argc, argv);
  Preemption preemption;  // here, so that a signal before the first step is heard too
  if (options.smoke) return smoke_test(options, examples::synthetic_images()), 0;
  torch::manual_seed(options.seed);
  const auto data = options.synthetic ? examples::synthetic_images(5000, 10) : examples::fashion_mnist(options.data);
  const RunReport report = train(options, data, std::move(preemption)).report;
  return report.reason == StopReason::preempted ? examples::interrupted(report, options.directory) : report.exit_code();
} catch (const c10::Error& error) {
  std::cerr << "error: " << error.what_without_backtrace() << '\n';
  return 2;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 2;
}
