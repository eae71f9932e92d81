// Everything at once, on real data: every policy at work in one Trainer, and what each of them did. See --help.

#include "support/epoch_log.hpp"
#include "support/fashion_mnist.hpp"
#include "support/net.hpp"
#include "support/options.hpp"
#include "support/phase_timer.hpp"

#include <frugal/frugal.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <stdexcept>

using Amp = frugal::AmpPolicy<frugal::Auto>;
constexpr double full_rate = 2e-3, max_norm = 1.0;

struct Result {
  frugal::RunReport report;
  double accuracy;  // on the test images, in percent
};

// One line about each policy.
void describe(auto& trainer, const frugal::Batches<>& batches, const frugal::RunReport& report, auto&& rate) {
  const frugal::Progress& at = report.progress;
  const auto& stopper = trainer.template get<frugal::EarlyStopper>();
  const auto norm = trainer.template get<frugal::GradClip>().norm();
  double lowest = rate(0), highest = rate(0);
  for (std::int64_t step = 1; step < at.step; ++step) {  // a schedule is a pure function: it can be asked again
    lowest = std::min(lowest, rate(step));
    highest = std::max(highest, rate(step));
  }

  std::cout << "precision:    " << trainer.template get<Amp>().reason() << '\n'
            << "accumulation: " << at.step + at.skipped << " windows of up to " << batches.steps() << " x "
            << batches.micro_batch() << " samples, " << at.step << " steps, " << at.skipped << " skipped\n"
            << "clipping:     the gradient norm may be " << max_norm << " and was " << norm << " before the last step\n"
            << "schedule:     learning rates from " << full_rate * lowest << " to " << full_rate * highest << '\n'
            << "averaging:    validated and tested on the averaged weights\n"
            << "stopping:     " << to_string(report.reason) << " after epoch " << at.epoch << "; the best was epoch "
            << stopper.best_at() + 1 << " with " << stopper.best() << " % of the validation images\n"
            << "seconds:      " << trainer.template get<examples::PhaseTimer>().summary() << '\n';
}

Result train(const examples::Options& options, const examples::Data& data) {
  torch::manual_seed(options.seed);
  examples::Net model;
  model->to(options.device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(full_rate));
  const auto loss = [](examples::Net& net, const frugal::Batch& batch) {
    return torch::cross_entropy_loss(net(batch.inputs), batch.targets);
  };

  const frugal::Batches batches(data.train.pixels, data.train.labels,
                                {.batch_size = options.batch,
                                 .micro_batch = std::min(options.micro_batch, options.batch),
                                 .seed = options.seed,
                                 .device = options.device});
  const std::int64_t steps_per_epoch = (batches.samples() + options.batch - 1) / options.batch;
  const std::int64_t steps = options.epochs * steps_per_epoch, rising = steps / 20;
  const auto rate = frugal::warmup(rising, frugal::cosine(steps - rising));

  frugal::Trainer trainer{model,
                          optimizer,
                          loss,
                          Amp(options.device, {.precision = options.precision}),
                          frugal::GradAccumulator(batches.steps()),
                          frugal::GradClip(max_norm),
                          frugal::Schedule(rate),
                          frugal::Averager({.decay = 0.998}),
                          frugal::EarlyStopper({.patience = 3, .goal = frugal::Goal::maximize}),
                          frugal::ProgressBar({.epochs = options.epochs, .batches_per_epoch = batches.size()}),
                          examples::PhaseTimer{},
                          examples::EpochLog(options.directory)};
  const auto validate = [&] { return examples::accuracy(model, data.validation); };
  const frugal::RunReport report = trainer.fit(batches, validate, {.epochs = options.epochs});

  model->eval();
  const double accuracy = examples::accuracy(model, data.test);
  std::printf("test accuracy: %.1f %%\n", accuracy);
  std::fflush(stdout);
  describe(trainer, batches, report, rate);
  return {report, accuracy};
}

// The same seed gives the same network, and a good one.
void smoke_test(const examples::Options& options, const examples::Data& data) {
  const Result one = train(options, data), other = train(options, data);
  const bool same = one.report.progress.loss == other.report.progress.loss && one.accuracy == other.accuracy;
  if (!same) throw std::runtime_error("two runs with the same seed differ.");
  if (one.report.progress.samples != one.report.progress.epoch * data.train.size())
    throw std::runtime_error("not every image was seen once per epoch.");
  if (one.accuracy < 90) throw std::runtime_error("the network has not learned.");
}

int main(int argc, char** argv) try {
  const examples::Options options = examples::parse(argc, argv);
  if (options.smoke) return smoke_test(options, examples::synthetic_images()), 0;
  return train(options, examples::fashion_mnist(options.data)).report.exit_code();
} catch (const c10::Error& error) {
  std::cerr << "error: " << error.what_without_backtrace() << '\n';
  return 2;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 2;
}
