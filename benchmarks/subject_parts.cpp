#include "loops.hpp"
#include "measure.hpp"
#include "subject.hpp"

#include <frugal/testing.hpp>

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <utility>

// Parts of a training: the update alone, a save, an epoch of batches, a search for the batch.
namespace bench {
namespace {

// ---- the update ------------------------------------------------------------------------------------------------------

std::vector<torch::Tensor> weights_named(const std::string& name) {
  if (name == "gpt77") return workload("W6", 1).network->parameters();
  if (name == "resnet62") return workload("W4", 1).network->parameters();
  const auto some = [](std::int64_t count, std::int64_t size) {
    torch::manual_seed(1);
    std::vector<torch::Tensor> weights;
    for (std::int64_t i = 0; i < count; ++i) weights.push_back(torch::randn({size}).requires_grad_());
    return weights;
  };
  if (name == "one16m") return some(1, std::int64_t{1} << 24);
  if (name == "many200") return some(200, 256);
  throw std::invalid_argument("There are no weights " + name + ". There are gpt77, resnet62, one16m, many200.");
}

/// Updates on gradients that are given. Methods: optim (torch::optim's step), fused (FusedStep), bare (the kernel called
/// directly), whole (unscale, clip, check and FusedStep, as with fp16).
class Update final : public Subject {
 public:
  explicit Update(const Settings& settings)
      : method_(settings.method),
        name_(settings.workload),
        weights_(weights_named(settings.workload)),
        start_(flattened(weights_)),
        optimizer_(weights_, torch::optim::AdamWOptions(learning_rate).weight_decay(weight_decay)),
        amp_(torch::kCPU, frugal::Capability{.device = torch::kCPU, .cpu_fp16 = true},
             {.scaler = {.init_scale = 1, .growth_interval = std::int64_t{1} << 40}}) {
    torch::manual_seed(2);
    for (auto& weight : weights_) {
      gradients_.push_back(torch::randn(weight.sizes()));
      first_.push_back(torch::zeros(weight.sizes())), second_.push_back(torch::zeros(weight.sizes()));
    }
    counters_.assign(weights_.size(), torch::zeros({}));
    // Once, so that clipping multiplies by one and both sides step on the same gradients.
    double squares = 0;
    for (const auto& gradient : gradients_) squares += gradient.square().sum().item<double>();
    for (auto& gradient : gradients_) gradient.div_(std::sqrt(squares));
    for (std::size_t i = 0; i < weights_.size(); ++i) weights_[i].mutable_grad() = gradients_[i];
  }

  std::string what() const override {
    const std::string of = ", AdamW on the weights " + name_;
    if (method_ == "optim") return "torch::optim's step" + of;
    if (method_ == "fused") return "FusedStep" + of;
    if (method_ == "bare") return "the fused kernel called directly" + of;
    return "unscale, clip, look for overflow and FusedStep" + of;
  }
  Json run(std::int64_t n) override {
    return Json{{"seconds", seconds_of([&] {
                   for (std::int64_t i = 0; i < n; ++i) step();
                 })}};
  }
  Json check(std::int64_t n, const std::string& file) override {
    for (std::int64_t i = 0; i < n; ++i) step();
    write_bytes(flattened(weights_), file);
    return Json{{"losses", std::vector<double>()}};
  }
  Json compare(const std::string& file) override { return comparison(flattened(weights_), file, start_); }
  Json work() const override {
    // Weight and two moments are read and written, the gradient is read; all in float.
    return Json{{"bytes", 7.0 * 4.0 * static_cast<double>(start_.numel())}};
  }

 private:
  void step() {
    const torch::NoGradGuard no_grad;
    if (method_ == "optim") {
      optimizer_.step();
    } else if (method_ == "fused") {
      fused_.step(optimizer_);
    } else if (method_ == "bare") {
      counters_.front().add_(1);
      at::_fused_adamw_(weights_, gradients_, first_, second_, {}, counters_, learning_rate, 0.9, 0.999, weight_decay,
                        1e-8, false, false);
    } else if (method_ == "whole") {
      amp_.scale(loss_);
      for (std::size_t i = 0; i < weights_.size(); ++i) weights_[i].mutable_grad() = gradients_[i];
      frugal::update(optimizer_, amp_, clip_, fused_);
    } else {
      throw std::invalid_argument("There is no method " + method_ + ". There are optim, fused, bare, whole.");
    }
  }

  std::string method_, name_;
  std::vector<torch::Tensor> weights_;
  torch::Tensor start_, loss_ = torch::ones({});
  torch::optim::AdamW optimizer_;
  frugal::AmpPolicy<frugal::Fp16> amp_;
  frugal::GradClip clip_{1.0};
  frugal::FusedStep fused_;
  std::vector<torch::Tensor> gradients_, first_, second_, counters_;
};

// ---- a save ----------------------------------------------------------------------------------------------------------

void make_durable(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY);
  if (file < 0 || ::fsync(file) != 0) throw std::runtime_error("cannot make " + path + " durable");
  ::close(file);
}

/// Saves of the 9 million weights of W6 with AdamW's moments. Methods: stall (how long CheckpointManager keeps the training
/// waiting), durable (until it is on the disk), blocking (Writing::blocking), torch (torch::save and fsync to a new file), raw
/// (the same bytes, written and fsynced), memcpy (copied in memory).
class Save final : public Subject {
 public:
  explicit Save(const Settings& settings)
      : method_(settings.method),
        folder_(std::filesystem::path(settings.directory) / ("save-" + std::to_string(::getpid()))),
        work_(workload("W6")),
        optimizer_(adamw(*work_.network)),
        checkpoints_({.directory = folder_ / "checkpoints",
                      .writing = method_ == "blocking" ? frugal::Writing::blocking : frugal::Writing::background}) {
    std::filesystem::create_directories(folder_);
    loss_of(*work_.network, work_.at(0)).backward();
    optimizer_.step();  // the moments
    optimizer_.zero_grad();
    for (const auto& weight : work_.network->parameters()) bytes_ += 3 * weight.nbytes();
    from_.assign(bytes_, 1), to_.assign(bytes_, 2);
  }
  ~Save() override { std::filesystem::remove_all(folder_); }

  std::string what() const override {
    if (method_ == "stall") return "CheckpointManager::save in the background: how long the training waits";
    if (method_ == "durable") return "CheckpointManager::save until the file is durable";
    if (method_ == "blocking") return "CheckpointManager::save with Writing::blocking";
    if (method_ == "torch") return "torch::save of model and optimizer into a new file, and fsync";
    if (method_ == "raw") return "one write of the same bytes into a new file, and fsync";
    return "memcpy of the same bytes";
  }
  Json run(std::int64_t n) override {
    double seconds = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      seconds += seconds_of([&] { save(); });
      if (method_ == "stall") checkpoints_.wait();
    }
    return Json{{"seconds", seconds}};
  }
  Json check(std::int64_t, const std::string& file) override {
    save();
    if (method_ != "memcpy" && method_ != "raw") checkpoints_.wait();
    write_bytes(flattened(work_.network->parameters()), file);  // saving changes nothing
    return Json{{"losses", std::vector<double>()}};
  }
  Json compare(const std::string& file) override {
    const auto now = flattened(work_.network->parameters());
    return comparison(now, file, now);
  }
  Json work() const override { return Json{{"bytes", bytes_}}; }

 private:
  void save() {
    if (method_ == "stall" || method_ == "durable" || method_ == "blocking") {
      checkpoints_.save({.step = ++saves_}, *work_.network, optimizer_);
      if (method_ == "durable") checkpoints_.wait();
    } else if (method_ == "torch") {
      torch::serialize::OutputArchive model, optimizer;
      work_.network->save(model), optimizer_.save(optimizer);
      for (auto* archive : {&model, &optimizer}) {
        const auto file = (folder_ / ("torch-" + std::to_string(++saves_) + ".pt")).string();
        archive->save_to(file);
        make_durable(file);
        std::filesystem::remove(file);
      }
    } else if (method_ == "raw") {
      const auto file = (folder_ / ("raw-" + std::to_string(++saves_))).string();
      const int out = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
      for (std::size_t at = 0; out >= 0 && at < bytes_;) {
        const auto written = ::write(out, from_.data() + at, bytes_ - at);
        if (written <= 0) throw std::runtime_error("cannot write " + file);
        at += static_cast<std::size_t>(written);
      }
      if (out < 0 || ::fsync(out) != 0) throw std::runtime_error("cannot write " + file);
      ::close(out);
      std::filesystem::remove(file);
    } else if (method_ == "memcpy") {
      std::memcpy(to_.data(), from_.data(), bytes_);
    } else {
      throw std::invalid_argument("There is no method " + method_ +
                                  ". There are stall, durable, blocking, torch, raw, memcpy.");
    }
  }

  std::string method_;
  std::filesystem::path folder_;
  Workload work_;
  AdamW optimizer_;
  frugal::CheckpointManager<> checkpoints_;
  std::size_t bytes_ = 0;
  std::vector<char> from_, to_;
  std::int64_t saves_ = 0;
};

// ---- an epoch of batches ---------------------------------------------------------------------------------------------

/// All batches of 20 000 samples of 784 numbers that are in memory, 256 at once. Methods: frugal (Batches), dataloader
/// (LibTorch's, random sampler, stacked).
class Epoch final : public Subject {
 public:
  explicit Epoch(const Settings& settings) : method_(settings.method) {
    torch::manual_seed(1);
    inputs_ = torch::randn({20000, 784}), targets_ = torch::randint(10, {20000}, torch::kLong);
  }

  std::string what() const override {
    return method_ == "frugal" ? "Batches of two tensors, one epoch"
                               : "LibTorch's DataLoader over the same tensors, one epoch";
  }
  Json run(std::int64_t n) override {
    std::int64_t samples = 0;
    const double seconds = seconds_of([&] {
      for (std::int64_t i = 0; i < n; ++i) each([&](const auto& inputs, const auto&) { samples += inputs.size(0); });
    });
    return Json{{"seconds", seconds}, {"samples", samples}};
  }
  // Both deliver each sample once: the sums are the same.
  Json check(std::int64_t, const std::string& file) override {
    write_bytes(sums(), file);
    return Json{{"losses", std::vector<double>()}};
  }
  Json compare(const std::string& file) override { return comparison(sums(), file, torch::zeros({785})); }
  Json work() const override { return Json{{"bytes", inputs_.nbytes()}, {"samples", inputs_.size(0)}}; }

 private:
  struct Samples : torch::data::datasets::Dataset<Samples> {
    torch::Tensor inputs, targets;
    Samples(torch::Tensor in, torch::Tensor out) : inputs(std::move(in)), targets(std::move(out)) {}
    torch::data::Example<> get(std::size_t i) override {
      const auto at = static_cast<std::int64_t>(i);
      return {inputs[at], targets[at]};
    }
    std::optional<std::size_t> size() const override { return static_cast<std::size_t>(inputs.size(0)); }
  };

  void each(auto&& visit) {
    if (method_ == "frugal") {
      const frugal::Batches batches(inputs_, targets_, {.batch_size = 256});
      for (const auto& batch : batches.epoch(epoch_++)) visit(batch.inputs, batch.targets);
    } else if (method_ == "dataloader") {
      auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
          Samples(inputs_, targets_).map(torch::data::transforms::Stack<>()), 256);
      for (auto& batch : *loader) visit(batch.data, batch.target);
    } else {
      throw std::invalid_argument("There is no method " + method_ + ". There are frugal, dataloader.");
    }
  }
  torch::Tensor sums() {
    auto all = torch::zeros({785}, torch::kDouble);
    each([&](const torch::Tensor& inputs, const torch::Tensor& targets) {
      all.narrow(0, 0, 784) += inputs.to(torch::kDouble).sum(0);
      all[784] += targets.sum();
    });
    return all.to(torch::kFloat);
  }

  std::string method_;
  torch::Tensor inputs_, targets_;
  std::int64_t epoch_ = 0;
};

// ---- the search for the batch ----------------------------------------------------------------------------------------

/// Searches with BatchSizeProber where memory ends at hidden sizes; counted, not timed.
class Probe final : public Subject {
 public:
  explicit Probe(const Settings&) {}
  std::string what() const override { return "BatchSizeProber against 40 hidden limits from 32 to 40 000 samples"; }
  Json run(std::int64_t) override {
    double trials = 0, share = 0, least = 1;
    int searches = 0;
    for (double limit = 32; limit < 40000; limit *= 1.2, ++searches) {
      const auto hidden = static_cast<std::int64_t>(limit);
      const frugal::testing::MemoryOracle memory(hidden);
      const auto found = frugal::BatchSizeProber().largest([&](std::int64_t n) { memory(n); });
      trials += static_cast<double>(memory.tried().size());
      share += static_cast<double>(found) / static_cast<double>(hidden);
      least = std::min(least, static_cast<double>(found) / static_cast<double>(hidden));
    }
    return Json{{"seconds", 0}, {"trials", trials / searches}, {"share", share / searches}, {"least_share", least}};
  }
  Json check(std::int64_t, const std::string&) override { return Json{{"losses", std::vector<double>()}}; }
  Json compare(const std::string&) override { return Json{{"difference", 0}}; }
};

}  // namespace

std::unique_ptr<Subject> make_update(const Settings& settings) { return std::make_unique<Update>(settings); }
std::unique_ptr<Subject> make_save(const Settings& settings) { return std::make_unique<Save>(settings); }
std::unique_ptr<Subject> make_epoch(const Settings& settings) { return std::make_unique<Epoch>(settings); }
std::unique_ptr<Subject> make_probe(const Settings& settings) { return std::make_unique<Probe>(settings); }

}  // namespace bench
