// Policies of your own come in by the same door as ours: a class names its role and has the verbs of that role.

#include "support/task.hpp"

#include <frugal/batches.hpp>
#include <frugal/trainer.hpp>

#include <torch/torch.h>

#include <cmath>
#include <iostream>
#include <limits>

using frugal::Progress, frugal::Role, frugal::StopReason, frugal::Verdict;

// A stopping rule: ends the run when the validation loss has risen by `percent` over its best value (the generalization
// loss of Prechelt, "Early stopping - but when?", 1998). What it remembers goes into checkpoints by itself.
class GeneralizationLoss {
 public:
  static constexpr Role role = Role::stopping;
  explicit GeneralizationLoss(double percent) : percent_(percent) {}

  Verdict observe(double loss) {
    if (loss < best_) return best_ = loss, Verdict::improved;
    if (loss > best_ * (1 + percent_ / 100)) reason_ = StopReason::plateau;
    return reason_ == StopReason::none ? Verdict::waiting : Verdict::stop;
  }
  StopReason reason() const { return reason_; }
  bool restores_best() const { return true; }  // optional: the Trainer brings the best weights back
  double best() const { return best_; }        // optional: RunReport::best_metric

  void save(auto& out) const { out.write("best", best_); }
  void load(auto& in) { in.read("best", best_); }
  void reset() { *this = GeneralizationLoss(percent_); }

 private:
  double percent_;
  double best_ = std::numeric_limits<double>::infinity();
  StopReason reason_ = StopReason::none;
};

// An observer that changes the gradients: noise that fades with the steps (Neelakantan et al., "Adding gradient noise
// improves learning for very deep networks", 2015).
class GradientNoise {
 public:
  static constexpr Role role = Role::observer;
  explicit GradientNoise(double eta) : eta_(eta) {}

  void on_gradients(examples::Net& model) {  // unscaled, not yet clipped
    const torch::NoGradGuard no_grad;
    const double deviation = std::sqrt(eta_ / std::pow(1.0 + static_cast<double>(step_), 0.55));
    for (const auto& weights : model->parameters()) weights.grad().add_(torch::randn_like(weights), deviation);
  }
  void on_step(const Progress& at) { step_ = at.step; }

  void save(auto& out) const { out.write("step", step_); }
  void load(auto& in) { in.read("step", step_); }
  void reset() { step_ = 0; }

 private:
  double eta_;
  std::int64_t step_ = 0;
};

// An observer that ends the run when it has seen enough: what it may cost is known beforehand.
struct SampleBudget {
  static constexpr Role role = Role::observer;
  std::int64_t samples;
  bool spent = false;

  void on_step(const Progress& at) { spent = at.samples >= samples; }
  StopReason stop() const { return spent ? StopReason::budget : StopReason::none; }
};

int main(int argc, char** argv) {
  const examples::Task task(argc, argv);
  torch::manual_seed(1);
  examples::Net model;
  model->to(task.device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const frugal::Batches batches(task.train().pixels, task.train().labels, {.batch_size = 64, .device = task.device});
  const auto loss = [](examples::Net& net, const frugal::Batch& batch) {
    return torch::cross_entropy_loss(net(batch.inputs), batch.targets);
  };

  const std::int64_t budget = 5 * task.train().size();
  frugal::Trainer trainer{model, optimizer, loss, GeneralizationLoss(5), GradientNoise(1e-4), SampleBudget{budget}};
  const auto report = trainer.fit(batches, [&] { return task.loss(model); }, {.epochs = 100});
  std::cout << "stopped for " << to_string(report.reason) << " after " << report.progress.epoch
            << " epochs, best validation loss " << report.best_metric << ": " << task.accuracy(model) << " % right\n";

  return task.check("the run ends by one of our rules, with a network that has learned", [&] {
    const bool ours = report.reason == StopReason::plateau || report.reason == StopReason::budget;
    return ours && report.progress.samples <= budget + 64 && task.accuracy(model) > 90;
  });
}
