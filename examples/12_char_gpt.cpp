// A small GPT learns to write, character by character, from a text file: by default the Jargon File. See --help.
//
// Windows of text differ in length. The loss function returns the mean per character with the number of characters, and
// accumulation weighs by them: a step is exactly the step on the mean over all characters of the batch.

#include "support/gpt.hpp"
#include "support/job.hpp"
#include "support/options.hpp"
#include "support/text.hpp"

#include <frugal/frugal.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using Amp = frugal::AmpPolicy<frugal::Auto>;
using examples::Gpt, examples::Text, examples::Windows;
using frugal::Preemption, frugal::Progress, frugal::RunReport, frugal::StopReason;

struct Options : examples::JobOptions {
  std::int64_t steps = 1600;
  std::int64_t check_every = 200;
  double rate = 3e-3;
  examples::GptOptions model;
  std::string text;
};

Options parse(int argc, char** argv) {
  Options options;
  options.batch = 16;
  CLI::App app("Trains a small GPT on a text, and lets it write a few paragraphs.");
  const auto positive = [&](const char* name, std::int64_t& value, const char* text) {
    app.add_option(name, value, text)->check(CLI::PositiveNumber)->capture_default_str();
  };
  positive("--steps", options.steps, "optimizer steps");
  positive("--check-every", options.check_every, "steps between two validations, each with a checkpoint");
  app.add_option("--rate", options.rate, "the highest learning rate")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  positive("--context", options.model.context, "characters that the model sees at once");
  positive("--width", options.model.width, "numbers per character inside the model");
  positive("--heads", options.model.heads, "attention heads; a divisor of the width");
  positive("--blocks", options.model.blocks, "blocks of attention and layers");
  app.add_option("--text", options.text,
                 "a text file, plain or .gz; else the Jargon File, where the Debian package jargon-text puts it");
  examples::parse(app, options, argc, argv);
  if (options.model.width % options.model.heads != 0) throw std::runtime_error("--heads does not divide --width");
  if (options.smoke) torch::set_num_threads(1);  // small tensors, and tests run side by side
  return options;
}

frugal::Weighted<torch::Tensor> loss_of(Gpt& model, const Windows& windows) {
  return {examples::loss_per_character(model, windows), windows.tokens};
}

// In nats per character, over a whole text.
double evaluate(Gpt& model, Amp& amp, const Text& text, const torch::Device device) {
  const torch::NoGradGuard no_grad;
  auto sum = torch::zeros({}, torch::TensorOptions(device).dtype(torch::kDouble));
  const frugal::Batches batches(text.size(), [&](torch::Tensor numbers) { return text.fetch(numbers); },
                                {.batch_size = 64, .order = frugal::Order::sequential, .device = device});
  for (const Windows& windows : batches.epoch(0)) {
    const auto guard = amp.autocast();
    sum += examples::loss_per_character(model, windows) * windows.tokens;
  }
  return sum.item<double>() / static_cast<double>(text.tokens());
}

struct Result {
  RunReport report;
  Gpt model;
};

Result train(const Options& options, const Text& text, const Text& held_out, Preemption preemption) {
  torch::manual_seed(options.seed);
  Gpt model(options.model);
  model->to(options.device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(options.rate).weight_decay(0.1));
  Amp amp(options.device, {.precision = options.precision});

  const auto plan = examples::plan(options.batch, options.micro_batch, [&] {
    const auto longest = [&](std::int64_t n) {  // as much memory as a batch may need
      const auto zeros =
          torch::zeros({n, options.model.context}, torch::TensorOptions(options.device).dtype(torch::kLong));
      return Windows{{zeros, zeros}, zeros.numel()};
    };
    return frugal::BatchSizeProber({.max = text.size()}).plan(options.batch, model, optimizer, longest, loss_of, amp);
  });
  const frugal::Batches batches(text.size(), [&](torch::Tensor numbers) { return text.fetch(numbers); },
                                {.batch_size = options.batch,
                                 .micro_batch = plan.micro_batch,
                                 .seed = options.seed,
                                 .device = options.device,
                                 .prefetch = 1});
  const std::int64_t rising = options.steps / 10;

  frugal::Trainer trainer{model,
                          optimizer,
                          loss_of,
                          std::move(amp),
                          frugal::GradAccumulator(plan.steps),
                          frugal::GradClip(1.0),
                          frugal::FusedStep{},
                          frugal::Schedule(frugal::warmup(rising, frugal::cosine(options.steps - rising))),
                          frugal::CheckpointManager(
                              {.directory = options.directory, .every_epochs = 0, .every_steps = options.check_every}),
                          std::move(preemption),
                          frugal::ProgressBar({.batches_per_epoch = batches.size()})};
  trainer.resume();
  const Progress start = trainer.progress();
  const auto validate = [&] {
    const double nats = evaluate(model, trainer.get<Amp>(), held_out, options.device);
    std::cout << "step " << trainer.progress().step << ": " << nats << " nats per character" << std::endl;
    return nats;
  };
  const RunReport report = trainer.fit(
      batches, validate, {.epochs = 0, .max_steps = options.steps, .validate_every_steps = options.check_every});
  if (report.reason == StopReason::preempted) return {report, model};

  std::cout << "precision:    " << trainer.get<Amp>().reason() << '\n'
            << "validation:   " << report.progress.metric << " nats per character after " << report.progress.step
            << " steps\n";
  examples::describe_checkpoints(trainer.get<frugal::CheckpointManager<>>(), start);
  if (report.progress.samples == start.samples)
    std::cout << "This run was over already; another --directory begins a new one.\n";
  model->eval();
  return {report, model};
}

// Nats per character of a model that knows how frequent characters are, and nothing else.
double unigram(const Text& text) {
  std::vector<double> count(static_cast<std::size_t>(examples::characters));
  for (const auto character : text.all()) ++count[static_cast<std::size_t>(character)];
  const auto n = static_cast<double>(text.all().size());
  double nats = 0;
  for (const double times : count)
    if (times > 0) nats -= times / n * std::log(times / n);
  return nats;
}

// Sentences of different lengths.
std::vector<std::string> tiny_text() {
  const std::vector<std::string> who = {"the cat", "a programmer", "nobody", "the old machine in the cellar"};
  const std::vector<std::string> does = {"reads", "sleeps on", "has never understood", "would like to eat"};
  const std::vector<std::string> what = {"the manual", "mice", "a keyboard that is made of cheese", "it"};
  std::vector<std::string> sentences;
  for (const auto& one : who)
    for (const auto& two : does)
      for (const auto& three : what) sentences.push_back(one + ' ' + two + ' ' + three + '.');
  return sentences;
}

// The weights after one step on the whole text, in micro-batches of this size.
torch::Tensor one_step(const examples::GptOptions& options, const Text& text, std::int64_t micro_batch) {
  torch::manual_seed(1);
  Gpt model(options);
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  const frugal::Batches batches(text.size(), [&](torch::Tensor numbers) { return text.fetch(numbers); },
                                {.batch_size = text.size(), .micro_batch = micro_batch});
  frugal::GradAccumulator accumulator(batches.steps());
  for (const Windows& windows : batches.epoch(0)) {
    const auto [loss, weight] = loss_of(model, windows);
    if (accumulator.backward(loss, weight)) frugal::update(optimizer, accumulator);
  }
  return torch::nn::utils::parameters_to_vector(model->parameters()).detach();
}

void smoke_test(Options options) {
  const auto need = [](bool holds, const char* claim) {
    if (!holds) throw std::runtime_error(std::string("not true: ") + claim);
  };
  options.model = {.context = 48, .width = 32, .heads = 2, .blocks = 2};
  options.batch = 16;
  options.steps = 400;
  options.check_every = 100;
  options.rate = 1e-2;
  const auto [text, held_out] = examples::split(tiny_text(), options.model.context, 8);

  const auto all = text.fetch(torch::arange(text.size()));
  need(all.tokens == text.tokens() && all.targets.ne(examples::ignored).sum().item<std::int64_t>() == text.tokens(),
       "every character is predicted once");
  Result result = train(options, text, held_out, Preemption{});
  need(result.report.progress.metric < 0.5 * unigram(text), "it knows more than how frequent characters are");
  std::cout << "It writes: " << examples::sample(result.model, 100, 0.5) << '\n';

  double sum = 0, sum_of_means = 0;
  for (std::int64_t i = 0; i < text.size(); ++i) {
    const auto [loss, weight] = loss_of(result.model, text.fetch(torch::full({1}, i, torch::kLong)));
    sum += loss.item<double>() * weight;
    sum_of_means += loss.item<double>();
  }
  const double mean = examples::loss_per_character(result.model, all).item<double>();
  need(std::abs(sum / double(text.tokens()) - mean) < 1e-4, "weighed by characters, windows have the mean of the text");
  need(std::abs(sum_of_means / double(text.size()) - mean) > 1e-3, "and without weights they have not");

  const auto whole = one_step(options.model, text, text.size()), parts = one_step(options.model, text, 5);
  need((whole - parts).abs().max().item<double>() < 1e-5, "a step on small micro-batches is the step on all of them");
}

int main(int argc, char** argv) try {
  const Options options = parse(argc, argv);
  Preemption preemption;  // here, so that a signal before the first step is heard too
  if (options.smoke) return smoke_test(options), 0;
  const auto paragraphs = examples::paragraphs_of(examples::text_of(options.text));
  const auto [text, held_out] = examples::split(paragraphs, options.model.context, 20);
  std::cout << "text:         " << paragraphs.size() << " paragraphs, " << text.size() << " windows with "
            << text.tokens() << " characters, and " << held_out.tokens() << " for validation\n";

  Result result = train(options, text, held_out, std::move(preemption));
  if (result.report.reason == StopReason::preempted) return examples::interrupted(result.report, options.directory);
  std::cout << "It writes:\n";
  for (int i = 0; i < 4; ++i) std::cout << "\n  " << examples::sample(result.model, 300, 0.7) << '\n';
  return result.report.exit_code();
} catch (const c10::Error& error) {
  std::cerr << "error: " << error.what_without_backtrace() << '\n';
  return 2;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 2;
}
