#include "loops.hpp"
#include "measure.hpp"
#include "subject.hpp"

#include "../examples/support/fashion_mnist.hpp"
#include "../examples/support/net.hpp"
#include "../examples/support/text.hpp"

#include <sstream>
#include <utility>

// Time to a target on real data: the same network, data, order and rate, trained until a validation reaches the target.
namespace bench {
namespace {

struct Curve {
  std::vector<double> seconds, metric, loss;
  Json json() const { return Json{{"seconds", seconds}, {"metric", metric}, {"loss", loss}}; }
};

/// Something to be learned, with a number that is to be reached.
struct Task {
  std::shared_ptr<Network> network;
  torch::Tensor inputs, targets;                         // for training
  std::int64_t batch = 0, check_every = 0, longest = 0;  // in samples, steps, steps
  bool higher_is_better = false;
  std::function<double()> validate;

  bool reached(double metric, double target) const { return higher_is_better ? metric >= target : metric <= target; }
};

struct ImageNetwork final : Network {
  ImageNetwork() { register_module("net", net); }
  torch::Tensor forward(const torch::Tensor& images) override { return net(images); }
  examples::Net net;
};

// Accuracy in percent on images that are not trained on.
Task fashion_mnist(const std::string& folder) {
  auto data = examples::fashion_mnist(folder);
  auto network = std::make_shared<ImageNetwork>();
  return {network, data.train.pixels, data.train.labels, 128, 50, 4000, true, [network, held_out = data.validation] {
            return examples::accuracy(network->net, held_out);
          }};
}

// The loss per character on the last twentieth of the text.
Task text(const std::string& file) {
  const std::string all = examples::text_of(file);
  const GptOptions options;
  const auto windows = [&](std::int64_t from, std::int64_t to) {
    const std::int64_t length = options.context + 1, n = (to - from) / options.context - 1;
    auto made = torch::empty({n, length}, torch::kLong);
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t k = 0; k < length; ++k)
        made.mutable_data_ptr<std::int64_t>()[i * length + k] =
            static_cast<unsigned char>(all[static_cast<std::size_t>(from + i * options.context + k)]);
    return made;
  };
  const auto size = static_cast<std::int64_t>(all.size()), cut = size - size / 20;
  const auto train = windows(0, cut), rest = windows(cut, size).narrow(0, 0, 256).contiguous();
  auto network = std::make_shared<Gpt>(options);
  const auto inputs = [&](const torch::Tensor& text) { return text.narrow(1, 0, options.context).contiguous(); };
  const auto targets = [&](const torch::Tensor& text) { return text.narrow(1, 1, options.context).contiguous(); };
  const frugal::Batch held_out{inputs(rest), targets(rest)};
  return {network, inputs(train), targets(train), 12, 50, 4000, false, [network, held_out] {
            const torch::NoGradGuard no_grad;
            return loss_of(*network, held_out).item<double>();
          }};
}

class Target final : public Subject {
 public:
  Target(const Settings& settings, Task task) : settings_(settings), task_(std::move(task)) {}

  std::string what() const override {
    const std::string of = settings_.loop + " loop, " + settings_.precision + ", " + settings_.workload;
    if (settings_.method == "patience") return of + " until 8 checks in a row showed no progress";
    if (settings_.method == "whole") return of + ", 10 epochs";
    std::ostringstream text;
    text << of << " until it reaches " << settings_.target;
    return text.str();
  }
  // Trains once, whatever n is: a training cannot be repeated on trained weights.
  Json run(std::int64_t) override {
    const bool own = settings_.loop == "frugal";
    const double seconds = seconds_of([&] { own ? by_frugal() : by_hand(); });
    return Json{{"seconds", seconds}, {"steps", steps_}, {"reached", reached_}, {"curve", curve_.json()}};
  }
  Json check(std::int64_t, const std::string&) override { return Json{{"losses", std::vector<double>()}}; }
  Json compare(const std::string&) override { return Json{{"difference", 0}}; }

 private:
  bool observe(double metric, double loss) {
    const std::chrono::duration<double> since = std::chrono::steady_clock::now() - begun_;
    curve_.seconds.push_back(since.count()), curve_.metric.push_back(metric), curve_.loss.push_back(loss);
    return reached_ = task_.reached(metric, settings_.target);
  }

  // What a tutorial has: DataLoader's order, torch::optim's step, float32 or stock autocast.
  void by_hand() {
    begun_ = std::chrono::steady_clock::now();
    auto optimizer = adamw(*task_.network);
    const LoopOptions options{.precision = settings_.precision};
    const frugal::Batches batches(task_.inputs, task_.targets, {.batch_size = task_.batch, .seed = settings_.seed});
    for (std::int64_t epoch = 0;; ++epoch)
      for (const auto& batch : batches.epoch(epoch)) {
        const auto loss = [&] {
          const StockAutocast autocast(torch::kCPU, options.dtype());
          return loss_of(*task_.network, batch);
        }();
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        if (++steps_ % task_.check_every != 0) continue;
        task_.network->eval();
        const double metric = task_.validate();
        task_.network->train();
        if (observe(metric, loss.item<double>()) || steps_ == task_.longest) return;
      }
  }

  void by_frugal() {
    using namespace frugal;
    begun_ = std::chrono::steady_clock::now();
    auto optimizer = adamw(*task_.network);
    LoopOptions options;
    options.precision = settings_.precision;
    const Batches batches(task_.inputs, task_.targets, {.batch_size = task_.batch, .seed = settings_.seed});
    const bool patient = settings_.method == "patience";
    if (!settings_.method.empty()) task_.longest = 10 * ((task_.inputs.size(0) + task_.batch - 1) / task_.batch);
    EarlyStopperOptions stopping{.patience = patient ? 8 : 100000,
                                 .goal = task_.higher_is_better ? Goal::maximize : Goal::minimize,
                                 .restore_best = patient};
    if (settings_.method.empty()) stopping.target = settings_.target;
    Trainer trainer{*task_.network, optimizer, &loss_of, amp_of(options), FusedStep{}, EarlyStopper(stopping)};
    const auto validate = [&] {
      const auto guard = trainer.get<AmpPolicy<>>().autocast();
      const double metric = task_.validate();
      observe(metric, trainer.progress().loss);
      return metric;
    };
    const auto report = trainer.fit(
        batches, validate, {.epochs = 1000, .max_steps = task_.longest, .validate_every_steps = task_.check_every});
    steps_ = report.progress.step;
    if (!settings_.method.empty()) reached_ = true;  // its end
  }

  Settings settings_;
  Task task_;
  Curve curve_;
  std::chrono::steady_clock::time_point begun_;
  std::int64_t steps_ = 0;
  bool reached_ = false;
};

}  // namespace

std::unique_ptr<Subject> make_target(const Settings& settings) {
  torch::manual_seed(settings.seed);
  if (settings.workload == "fashion-mnist") return std::make_unique<Target>(settings, fashion_mnist(settings.data));
  if (settings.workload == "text") return std::make_unique<Target>(settings, text(settings.data));
  throw std::invalid_argument("There is no target " + settings.workload + ". There are fashion-mnist, text.");
}

}  // namespace bench
