#include "loops.hpp"
#include "measure.hpp"
#include "subject.hpp"

#include <frugal/channels_last.hpp>

#include <ATen/Context.h>

#include <algorithm>
#include <cmath>
#include <utility>

// Whole training steps of a workload, by one of the loops.
namespace bench {

std::int64_t blocks_taken();  // from the heap so far; 0 in a program that does not count

namespace {

void order_channels_last(Workload& work) {
  frugal::to_channels_last(*work.network);
  const auto sizes = work.inputs.sizes().vec();
  work.inputs = frugal::channels_last(work.inputs.flatten(0, 1)).view(sizes);
}

// The same samples in the same order, each batch in so many parts.
void split(Workload& work, std::int64_t parts) {
  TORCH_CHECK(work.batch() % parts == 0, "a batch of ", work.batch(), " cannot be split into ", parts, " equal parts");
  for (auto* tensor : {&work.inputs, &work.targets}) {
    auto sizes = tensor->sizes().vec();
    sizes[0] *= parts, sizes[1] /= parts;
    *tensor = tensor->reshape(sizes);
  }
  work.flops /= static_cast<double>(parts);
}

void to_device(Workload& work, torch::Device device) {
  work.network->to(device);
  work.inputs = work.inputs.to(device);
  work.targets = work.targets.to(device);
}

template <class Loop>
class TrainingStep final : public Subject {
 public:
  TrainingStep(const Settings& settings, Workload work)
      : settings_(settings),
        work_(std::move(work)),
        start_(flattened(work_.network->parameters())),
        loop_(work_, {settings.device, settings.precision, settings.window, settings.fused, settings.clip,
                      settings.attention_in_fp32, settings.casts_per_step, settings.lagged_skips}) {
    work_.network->train();
  }

  std::string what() const override {
    std::string text = settings_.loop + " loop, " + settings_.precision + ", " + settings_.workload;
    if (settings_.window > 1)
      text += ", " + std::to_string(settings_.window) + " micro-batches of " + std::to_string(work_.batch());
    if (settings_.forward_backward) text += ", forward and backward only";
    if (settings_.channels_last) text += ", channels last";
    if (!settings_.fused) text += ", torch::optim's step";
    if (settings_.clip) text += ", gradient norm measured";
    if (settings_.attention_in_fp32) text += ", attention in fp32";
    if (settings_.casts_per_step) text += ", weights cast once per step";
    if (settings_.lagged_skips) text += ", skips learned late";
    if (settings_.tuned) text += ", allocator tuned";
    return text;
  }
  Json run(std::int64_t n) override {
    return Json{{"seconds", seconds_of([&] {
                   if (settings_.forward_backward)
                     for (std::int64_t i = 0; i < n; ++i) loop_.forward_backward(done_++);
                   else
                     for (std::int64_t i = 0; i < n; ++i) loop_.step(done_++);
                 })}};
  }
  Json check(std::int64_t n, const std::string& file) override {
    std::vector<double> losses;
    for (std::int64_t i = 0; i < n; ++i) {
      loop_.step(done_++);
      losses.push_back(loop_.loss().template item<double>());
    }
    write_bytes(flattened(work_.network->parameters()), file);
    return Json{{"losses", losses}};
  }
  Json compare(const std::string& file) override {
    return comparison(flattened(work_.network->parameters()), file, start_);
  }
  Json count(std::int64_t n) override {
    for (int i = 0; i < 4; ++i) loop_.step(done_++);
    const std::int64_t before = blocks_taken();
    for (std::int64_t i = 0; i < n; ++i) loop_.step(done_++);
    const std::int64_t taken = blocks_taken() - before;
    const Operators counted;
    for (std::int64_t i = 0; i < n; ++i) loop_.step(done_++);
    const auto each = [n](std::int64_t all) { return static_cast<double>(all) / static_cast<double>(n); };
    return Json{{"allocations", each(taken)},
                {"operators", each(counted.all())},
                {"casts", each(counted.casts())},
                {"reads", each(counted.reads())}};
  }
  // Under valgrind, where a step takes minutes; the numbers are callgrind's.
  Json instructions(std::int64_t n) override {
    for (int i = 0; i < 2; ++i) loop_.step(done_++);
    BENCH_CALLGRIND(CALLGRIND_START_INSTRUMENTATION);
    BENCH_CALLGRIND(CALLGRIND_ZERO_STATS);
    for (std::int64_t i = 0; i < n; ++i) loop_.step(done_++);
    BENCH_CALLGRIND(CALLGRIND_DUMP_STATS_AT("counted"));
    BENCH_CALLGRIND(CALLGRIND_STOP_INSTRUMENTATION);
    return Json{{"steps", n}};
  }
  Json export_to(const std::string& folder) override {
    const auto file = [&](const char* name) { return folder + "/" + name; };
    write_bytes(start_, file("weights.bin"));
    write_bytes(work_.inputs, file("inputs.bin"));
    write_bytes(work_.targets, file("targets.bin"));
    const Json meta{
        {"workload", work_.name},
        {"model", work_.model},
        {"batches", work_.inputs.size(0)},
        {"batch", work_.batch()},
        {"inputs", Json{{"file", "inputs.bin"},
                        {"shape", work_.inputs.sizes().vec()},
                        {"dtype", work_.inputs.is_floating_point() ? "float32" : "int64"}}},
        {"targets", Json{{"file", "targets.bin"}, {"shape", work_.targets.sizes().vec()}, {"dtype", "int64"}}},
        {"weights", "weights.bin"},
        {"learning_rate", learning_rate},
        {"weight_decay", weight_decay}};
    std::ofstream(file("meta.json")) << meta.text() << '\n';
    return Json{{"folder", folder}};
  }
  Json work() const override {
    return Json{{"flops", work_.flops * static_cast<double>(settings_.window)},
                {"samples", work_.batch() * settings_.window},
                {"reason", loop_.reason()}};
  }

 private:
  Settings settings_;
  Workload work_;
  torch::Tensor start_;
  Loop loop_;
  std::int64_t done_ = 0;
};

}  // namespace

std::unique_ptr<Subject> make_training_step(const Settings& settings) {
  at::globalContext().setAllowTF32CuDNN(settings.precision != "fp32");  // fp32 is strict here, in convolutions too
  Workload work = workload(settings.workload, settings.batch);
  if (settings.split > 1) split(work, settings.split);
  if (settings.channels_last) order_channels_last(work);
  to_device(work, settings.device);
  if (settings.loop == "naive") return std::make_unique<TrainingStep<NaiveLoop>>(settings, std::move(work));
  if (settings.loop == "best") return std::make_unique<TrainingStep<BestLoop>>(settings, std::move(work));
  if (settings.loop == "own") return std::make_unique<TrainingStep<OwnLoop>>(settings, std::move(work));
  if (settings.loop == "bare") return std::make_unique<TrainingStep<BareTrainer>>(settings, std::move(work));
  if (settings.loop == "frugal") return std::make_unique<TrainingStep<FullTrainer>>(settings, std::move(work));
  throw std::invalid_argument("There is no loop " + settings.loop + ". There are naive, best, own, bare, frugal.");
}

}  // namespace bench
