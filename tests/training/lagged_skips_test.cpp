// SkipDecision::lagged: a window that overflowed is skipped by the device, the host hears of it one window later, and everything
// is as if it had known at once.
#include "support/catch.hpp"
#include "support/caught_warnings.hpp"
#include "support/temporary_directory.hpp"
#include "training/network.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/averager.hpp>
#include <frugal/batch_size_prober.hpp>
#include <frugal/calibration.hpp>
#include <frugal/checkpoint_manager.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/fused_step.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/grad_clip.hpp>
#include <frugal/observers.hpp>
#include <frugal/schedule.hpp>
#include <frugal/state_guard.hpp>
#include <frugal/testing.hpp>
#include <frugal/trainer.hpp>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace frugal;
using namespace network;
using testing::OverflowAt;
using torch::optim::OptimizerParamGroup;

namespace {

const Capability able{.device = at::kCPU, .cpu_bf16 = true, .cpu_fp16 = true};
const std::vector<std::int64_t> sizes{8, 8, 8, 5};
using Calls = std::vector<std::int64_t>;

AmpPolicy<Fp16> fp16(SkipDecision decision, LossScalerOptions scaler = {.init_scale = 1024, .growth_interval = 3}) {
  return AmpPolicy<Fp16>(at::kCPU, able, {.scaler = scaler, .skip_decision = decision});
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<OptimizerParamGroup>)>;
template <class Optimizer, class Options>
Make making(const Options& options) {
  return [=](auto groups) { return std::make_unique<Optimizer>(std::move(groups), options); };
}
std::vector<Make> every_class() {
  using namespace torch::optim;
  return {making<AdamW>(AdamWOptions(0.01)), making<Adam>(AdamOptions(0.01).amsgrad(true)),
          making<SGD>(SGDOptions(0.05).momentum(0.9).dampening(0.5)), making<SGD>(SGDOptions(0.05)),
          making<Adagrad>(AdagradOptions(0.05))};
}

// Everything that an optimizer knows, by number, as one list of tensors.
std::vector<torch::Tensor> state_of(torch::optim::Optimizer& optimizer) {
  std::vector<torch::Tensor> all;
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      const auto add = [&](auto& state) { all.push_back(torch::tensor(static_cast<double>(state.step()))); };
      if (auto* adamw = dynamic_cast<torch::optim::AdamWParamState*>(found->second.get()))
        add(*adamw), all.push_back(adamw->exp_avg()), all.push_back(adamw->exp_avg_sq());
      else if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(found->second.get()))
        add(*adam), all.push_back(adam->exp_avg()), all.push_back(adam->max_exp_avg_sq());
      else if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(found->second.get()))
        all.push_back(sgd->momentum_buffer());
      else if (auto* adagrad = dynamic_cast<torch::optim::AdagradParamState*>(found->second.get()))
        add(*adagrad), all.push_back(adagrad->sum());
    }
  return all;
}
bool same_bits(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  return std::ranges::equal(a, b, [](const torch::Tensor& one, const torch::Tensor& other) {
    return one.defined() ? other.defined() && torch::equal(one, other) : !other.defined();
  });
}

struct HandRun {
  Net model = make();
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  AmpPolicy<Fp16> amp;
  FusedStep fused;
  GradClip clip{0.5};
  std::vector<StepResult> answers;

  HandRun(const Make& make_optimizer, SkipDecision decision, const Calls& overflows, int windows)
      : amp(fp16(decision)) {
    optimizer = make_optimizer({model->first->parameters(), model->second->parameters()});
    const auto batches = cut(data(29), sizes);
    OverflowAt loss{MeanLoss{}, overflows};
    GradAccumulator accumulator(2);
    for (int micro = 0; micro < 2 * windows; ++micro) {
      const Batch& batch = batches[static_cast<std::size_t>(micro) % batches.size()];
      auto value = [&] {
        auto guard = amp.autocast();
        return loss(model, batch);
      }();
      if (!backward(value, batch.size(), amp, accumulator)) continue;
      if (const auto late = settle(*optimizer, amp, fused); late != StepResult::accumulated) answers.push_back(late);
      const auto result = update(*optimizer, amp, accumulator, clip, fused);
      if (decision == SkipDecision::exact) answers.push_back(result);
      else CHECK(result == StepResult::applied);  // as far as is known
      if (amp.unanswered() != (decision == SkipDecision::lagged)) FAIL("who is asked when?");
    }
    if (const auto last = settle(*optimizer, amp, fused); last != StepResult::accumulated) answers.push_back(last);
  }
};

}  // namespace

TEST_CASE("lagged skips give the bits of exact ones, whatever overflows") {
  // the first window, one in the middle, two in a row, the last one; in the first or the second micro-batch
  const Calls overflows = GENERATE(Calls{}, Calls{0}, Calls{5}, Calls{1, 8, 10}, Calls{0, 1, 2, 3}, Calls{15});
  for (const Make& make_optimizer : every_class()) {
    HandRun exact(make_optimizer, SkipDecision::exact, overflows, 8),
        lagged(make_optimizer, SkipDecision::lagged, overflows, 8);
    CHECK(lagged.fused.reason() == "fused kernels");
    CHECK(same_bits(network::state_of(*exact.model), network::state_of(*lagged.model)));
    CHECK((exact.answers == lagged.answers));
    CHECK(exact.amp.scale_factor() == lagged.amp.scale_factor());
    CHECK(exact.amp.skipped() == lagged.amp.skipped());
    CHECK(exact.amp.skipped() == static_cast<std::int64_t>(std::ranges::count(exact.answers, StepResult::skipped)));
    CHECK(same_bits(state_of(*exact.optimizer), state_of(*lagged.optimizer)));
  }
}

namespace {

struct Seen {
  static constexpr Role role = Role::observer;
  std::vector<std::string>* log;
  bool every_step = false;
  bool due(const Progress& at) const { return every_step || at.step % 4 == 0; }
  std::int64_t forwards = 0;
  void on_phase(Phase phase) {
    if (phase == Phase::forward) ++forwards;
    if (phase == Phase::save) log->push_back("save after " + std::to_string(forwards) + " batches");
  }
  static constexpr bool reads_loss = true;
  void on_step(const Progress& at) {
    log->push_back("step " + std::to_string(at.step) + " loss " + std::to_string(at.loss));
  }
  void on_skip(const Progress& at) {
    log->push_back("skip " + std::to_string(at.skipped) + " after " + std::to_string(at.step));
  }
  void on_epoch(const Progress& at) {
    log->push_back("epoch " + std::to_string(at.epoch) + " step " + std::to_string(at.step));
  }
};

struct TrainedRun {
  Net model = make();
  torch::optim::AdamW optimizer = adamw(model->parameters());
  std::vector<std::string> log;
  RunReport report;
  double rate = 0, scale = 0, loss = 0;
  std::vector<torch::Tensor> moments;
  bool fused = false;

  template <class... More>
  TrainedRun(SkipDecision decision, const Calls& overflows, const FitOptions& options, bool every_step, More... more) {
    const auto batches = cut(data(29), sizes);
    Trainer trainer{model,
                    optimizer,
                    OverflowAt{MeanLoss{}, overflows},
                    fp16(decision),
                    FusedStep(),
                    Schedule(warmup(3, cosine(37))),
                    Averager({.decay = 0.5}),
                    Seen{&log, every_step},
                    std::move(more)...};
    const auto validate = [&] {
      const Data all = data(29);
      const auto metric = MeanLoss()(model, Batch{all.inputs, all.targets}).template item<double>();
      log.push_back("check " + std::to_string(metric));
      return metric;
    };
    report = trainer.fit(batches, validate, options);
    rate = optimizer.param_groups()[0].options().get_lr();
    scale = trainer.template get<AmpPolicy<Fp16>>().scale_factor();
    fused = trainer.template get<FusedStep>().reason() == "fused kernels";
    moments = state_of(optimizer);
  }
};

void compare(const TrainedRun& exact, const TrainedRun& lagged) {
  CHECK(lagged.fused);
  CHECK(network::same_bits(network::state_of(*exact.model), network::state_of(*lagged.model)));
  CHECK(same_bits(exact.moments, lagged.moments));
  CHECK(exact.report.progress.step == lagged.report.progress.step);
  CHECK(exact.report.progress.skipped == lagged.report.progress.skipped);
  CHECK(exact.report.progress.samples == lagged.report.progress.samples);
  CHECK(exact.report.progress.loss == lagged.report.progress.loss);
  CHECK(exact.report.progress.metric == lagged.report.progress.metric);
  CHECK(exact.report.progress.metric_step == lagged.report.progress.metric_step);
  CHECK(exact.report.reason == lagged.report.reason);
  CHECK(exact.rate == lagged.rate);
  CHECK(exact.scale == lagged.scale);
}

}  // namespace

TEST_CASE("a Trainer with lagged skips ends where one with exact skips does") {
  const Calls overflows = GENERATE(Calls{}, Calls{0}, Calls{3, 9, 10, 17}, Calls{11, 12, 13}, Calls{39}, Calls{38, 39});
  const bool every_step = GENERATE(false, true);
  SECTION("epochs") {
    const FitOptions options{.epochs = 10};
    const TrainedRun exact(SkipDecision::exact, overflows, options, every_step);
    const TrainedRun lagged(SkipDecision::lagged, overflows, options, every_step);
    compare(exact, lagged);
    CHECK(exact.log == lagged.log);
  }
  SECTION("a limit of steps, and checks every few of them") {
    const FitOptions options{.epochs = 30, .max_steps = 21, .validate_every_steps = 5};
    const TrainedRun exact(SkipDecision::exact, overflows, options, every_step);
    const TrainedRun lagged(SkipDecision::lagged, overflows, options, every_step);
    compare(exact, lagged);
    CHECK(exact.report.progress.step == 21);
    CHECK(exact.log == lagged.log);
  }
  SECTION("accumulation, clipping, stopping") {
    const FitOptions options{.epochs = 10, .validate_every_steps = 3};
    const auto run = [&](SkipDecision decision) {
      return TrainedRun(decision, overflows, options, every_step, GradAccumulator(3), GradClip(0.5),
                        EarlyStopper({.patience = 2}));
    };
    const TrainedRun exact = run(SkipDecision::exact), lagged = run(SkipDecision::lagged);
    compare(exact, lagged);
    CHECK(exact.log == lagged.log);
  }
}

TEST_CASE("checkpoints of a run with lagged skips go on as those with exact ones") {
  const auto run = [](SkipDecision decision, const std::string& folder, std::int64_t steps) {
    return TrainedRun(decision, {3, 9, 10}, {.max_steps = steps}, false,
                      CheckpointManager<>({.directory = folder, .every_steps = 2}));
  };
  const TemporaryDirectory one, other;
  const TrainedRun exact = run(SkipDecision::exact, one.path().string(), 10);
  const TrainedRun lagged = run(SkipDecision::lagged, other.path().string(), 10);
  compare(exact, lagged);
  CHECK(exact.log == lagged.log);
}

namespace {
struct Interruption {
  static constexpr Role role = Role::interruption;
  bool* asked;
  bool requested() const { return *asked; }
};
}  // namespace

TEST_CASE("an epoch of one window is training, and nothing is left open") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  const auto batches = cut(data(29), {8});
  SECTION("an epoch") {
    Trainer trainer{model, optimizer, OverflowAt{MeanLoss{}, {2}}, fp16(SkipDecision::lagged), FusedStep()};
    CHECK(trainer.fit(batches, {.epochs = 4}).progress.step == 3);
  }
  SECTION("an interruption without a CheckpointManager") {
    bool interrupted = false;
    const auto interrupts = [&](Net& net, const Batch& batch) {
      interrupted = true;
      return MeanLoss()(net, batch);
    };
    Trainer trainer{model,
                    optimizer,
                    OverflowAt{interrupts, {0}},
                    fp16(SkipDecision::lagged),
                    FusedStep(),
                    Interruption{&interrupted}};
    const auto report = trainer.fit(cut(data(29), sizes), {.epochs = 4});
    CHECK(report.reason == StopReason::preempted);
    CHECK(report.progress.step == 0);
    CHECK(report.progress.skipped == 1);
  }
  SECTION("flush() without a window") {
    Trainer trainer{model, optimizer, MeanLoss{}, fp16(SkipDecision::lagged), FusedStep()};
    CHECK(trainer.step(batches[0]) == StepResult::applied);
    CHECK(trainer.flush() == StepResult::accumulated);
    CHECK_FALSE(trainer.get<AmpPolicy<Fp16>>().unanswered());
  }
  SECTION("save()") {
    const TemporaryDirectory folder;
    Trainer trainer{model,
                    optimizer,
                    OverflowAt{MeanLoss{}, {1}},
                    fp16(SkipDecision::lagged),
                    FusedStep(),
                    CheckpointManager<>({.directory = folder.path().string()})};
    for (int i = 0; i < 2; ++i) CHECK(trainer.step(batches[0]) == StepResult::applied);
    trainer.save();
    CHECK(trainer.step(batches[0]) == StepResult::applied);
    CHECK(trainer.resume());
    CHECK_FALSE(trainer.get<AmpPolicy<Fp16>>().unanswered());
    CHECK(trainer.progress().step == 1);
  }
  SECTION("check()") {
    Trainer trainer{model, optimizer, MeanLoss{}, fp16(SkipDecision::lagged), FusedStep()};
    CHECK(trainer.step(batches[0]) == StepResult::applied);
    trainer.check(Metrics(1.0));
    CHECK(trainer.progress().metric_step == 1);
  }
  SECTION("flush() and restart()") {
    Trainer trainer{model,       optimizer,         OverflowAt{MeanLoss{}, {0, 2}}, fp16(SkipDecision::lagged),
                    FusedStep(), GradAccumulator(2)};
    CHECK(trainer.step(batches[0]) == StepResult::accumulated);
    CHECK(trainer.flush() == StepResult::skipped);
    CHECK(trainer.flush() == StepResult::accumulated);
    static_cast<void>(trainer.step(batches[0])), static_cast<void>(trainer.step(batches[0]));
    CHECK(trainer.get<AmpPolicy<Fp16>>().unanswered());
    trainer.restart();
    CHECK(trainer.progress().step == 0);
    CHECK(optimizer.state().empty());  // both were skipped
  }
}

TEST_CASE("progress() books what a step leaves open") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  const auto batches = cut(data(29), sizes);
  Trainer trainer{model, optimizer, OverflowAt{MeanLoss{}, {1}}, fp16(SkipDecision::lagged), FusedStep()};
  for (int i = 0; i < 2; ++i) CHECK(trainer.step(batches[0]) == StepResult::applied);
  CHECK(trainer.get<AmpPolicy<Fp16>>().unanswered());
  CHECK(trainer.progress().step == 1);
  CHECK(trainer.progress().skipped == 1);
  CHECK_FALSE(trainer.get<AmpPolicy<Fp16>>().unanswered());
  CHECK(trainer.step(batches[0]) == StepResult::applied);
  CHECK(trainer.progress().step == 2);
}

TEST_CASE("lagged skips are exact where the step cannot be told, or somebody looks at the gradients") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  const auto batches = cut(data(29), sizes);
  SECTION("no FusedStep") {
    Trainer trainer{model, optimizer, OverflowAt{MeanLoss{}, {1}}, fp16(SkipDecision::lagged)};
    CHECK(trainer.step(batches[0]) == StepResult::applied);
    CHECK(trainer.step(batches[0]) == StepResult::skipped);
  }
  SECTION("an observer of gradients") {
    int seen = 0;
    Trainer trainer{
        model, optimizer, OverflowAt{MeanLoss{}, {1}}, fp16(SkipDecision::lagged), FusedStep(), OnGradients([&](Net&) {
          ++seen;
        })};
    CHECK(trainer.step(batches[0]) == StepResult::applied);
    CHECK(trainer.step(batches[0]) == StepResult::skipped);
    CHECK(seen == 2);
  }
  SECTION("FusedStep that is switched off, or falls back, asks itself") {
    AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged);
    FusedStep fused({.stepping = Stepping::plain});
    const State before = network::state_of(*model);
    for (auto& parameter : model->parameters())
      parameter.mutable_grad() = torch::full_like(parameter, std::numeric_limits<float>::infinity());
    CHECK(update(optimizer, amp, fused) == StepResult::applied);
    CHECK(network::same_bits(before, network::state_of(*model)));
    CHECK(settle(optimizer, amp, fused) == StepResult::skipped);
  }
}

TEST_CASE("settle() refuses what would leave counters wrong") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged);
  FusedStep fused, another;
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::full_like(parameter, INFINITY);
  update(optimizer, amp, fused);
  CHECK_THROWS_WITH(settle(optimizer, amp), ContainsSubstring("Pass these two"));
  CHECK(amp.unanswered());
  SECTION("the right one") { CHECK(settle(optimizer, amp, fused) == StepResult::skipped); }
  SECTION("another one, whatever the answer is") {
    CHECK_THROWS_WITH(settle(optimizer, amp, another), ContainsSubstring("Pass these two"));
    CHECK(amp.unanswered());
    CHECK(settle(optimizer, amp, fused) == StepResult::skipped);
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    update(optimizer, amp, another);
    CHECK_THROWS_WITH(settle(optimizer, amp, fused), ContainsSubstring("Pass these two"));
    CHECK(settle(optimizer, amp, another) == StepResult::applied);
  }
  SECTION("another optimizer with the same first parameter") {
    auto twin = adamw(model->parameters());
    CHECK_THROWS_WITH(settle(twin, amp, fused), ContainsSubstring("Pass these two"));
    CHECK(settle(optimizer, amp, fused) == StepResult::skipped);
  }
}

TEST_CASE("while an answer is open, nobody keeps what may be taken back") {
  Net model = make(), other = make();
  auto optimizer = adamw(model->parameters()), of_another = adamw(other->parameters());
  AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged);
  FusedStep fused;
  Averager average({.decay = 0.5}), of_other({.decay = 0.5});
  average.update(model), of_other.update(other);
  const TemporaryDirectory folder;
  CheckpointManager checkpoints({.directory = folder.path().string(), .existing = Existing::append});
  const auto batch = cut(data(29), {8})[0];
  const auto make_batch = [&](std::int64_t) { return batch; };
  const auto guard = [&] { const StateGuard begun(model, optimizer); };
  const auto plan = [&] { return BatchSizeProber{}.plan(8, model, optimizer, make_batch, MeanLoss{}); };
  const auto plan_with_policy = [&] {
    return BatchSizeProber{}.plan(8, model, optimizer, make_batch, MeanLoss{}, amp);
  };
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::full_like(parameter, INFINITY);
  update(optimizer, amp, fused);
  const auto settle_first = ContainsSubstring("not known whether the last step was skipped");
  CHECK_THROWS_WITH(guard(), settle_first);
  CHECK_THROWS_WITH(average.update(model), settle_first);
  CHECK_THROWS_WITH(average.swap(model), settle_first);
  CHECK_THROWS_WITH(checkpoints.save({}, model, optimizer), settle_first);
  CHECK_THROWS_WITH(plan(), settle_first && !ContainsSubstring("samples"));
  CHECK_THROWS_WITH(plan_with_policy(), settle_first && !ContainsSubstring("samples"));
  CHECK_THROWS_WITH(calibrate(amp, model, optimizer, [] {}), settle_first);
  of_other.update(other), of_other.swap(other);  // others are not concerned
  const StateGuard others(other, of_another);

  SECTION("until it is settled") { CHECK(settle(optimizer, amp, fused) == StepResult::skipped); }
  SECTION("or the policy is as new") { amp.reset(); }
  SECTION("or gone, and moves with it") {
    {
      const AmpPolicy<Fp16> moved = std::move(amp);
      CHECK_THROWS_WITH(guard(), settle_first);
    }
    amp = fp16(SkipDecision::lagged);
  }
  guard();
  average.update(model), average.swap(model);
  checkpoints.save({}, model, optimizer);
  CHECK(plan().micro_batch == 8);
  CHECK(plan_with_policy().micro_batch == 8);
}

TEST_CASE("the Averager of a Trainer is reached with nothing open, and an answer that was taken is an error") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  const auto batches = cut(data(29), {8});
  Trainer trainer{model, optimizer, OverflowAt{MeanLoss{}, {1}}, fp16(SkipDecision::lagged), FusedStep(), Averager()};
  for (int i = 0; i < 2; ++i) CHECK(trainer.step(batches[0]) == StepResult::applied);
  auto& amp = trainer.get<AmpPolicy<Fp16>>();
  CHECK(amp.unanswered());
  SECTION("reached") {
    trainer.get<Averager>().swap(model);
    CHECK_FALSE(amp.unanswered());
    trainer.check(Metrics(1.0));
    CHECK(trainer.progress().skipped == 1);
    trainer.get<Averager>().swap(model);
    CHECK(trainer.step(batches[0]) == StepResult::applied);
    CHECK(trainer.progress().step == 2);
  }
  SECTION("taken") {
    CHECK(settle(optimizer, amp, trainer.get<FusedStep>()) == StepResult::skipped);
    CHECK_THROWS_WITH(trainer.progress(), ContainsSubstring("Ask progress() instead"));
    CHECK(trainer.progress().step == 1);  // once: the run goes on
    CHECK(trainer.step(batches[0]) == StepResult::applied);
    CHECK(trainer.progress().step == 2);
  }
}

TEST_CASE("what a skipped step counted is taken back, and nothing else") {
  Net model = make();
  AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged);
  FusedStep fused;
  const auto fill = [&](double gradient) {
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::full_like(parameter, gradient);
  };
  SECTION("the first momentum: torch::optim can take over") {
    auto optimizer = sgd(model->parameters());
    fill(INFINITY), update(optimizer, amp, fused);
    CHECK(settle(optimizer, amp, fused) == StepResult::skipped);
    CHECK(optimizer.state().empty());
    fill(1), optimizer.step();
  }
  SECTION("a parameter in two groups") {
    torch::optim::AdamW optimizer(std::vector<OptimizerParamGroup>{model->parameters(), {{model->first->weight}}});
    fill(1), update(optimizer, amp, fused);
    fill(INFINITY), update(optimizer, amp, fused);
    CHECK(settle(optimizer, amp, fused) == StepResult::skipped);
    const auto count = [&](const torch::Tensor& parameter) -> std::int64_t {
      return static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl())).step();
    };
    CHECK(count(model->first->weight) == 2);
    CHECK(count(model->second->weight) == 1);
  }
  SECTION("not a state that was loaded since, even one of the same count") {
    auto optimizer = adamw(model->parameters());
    fill(INFINITY), update(optimizer, amp, fused);
    for (auto& [key, state] : optimizer.state()) {
      auto loaded = std::make_unique<torch::optim::AdamWParamState>();
      loaded->step(1);
      state = std::move(loaded);
    }
    CHECK(settle(optimizer, amp, fused) == StepResult::skipped);
    for (auto& [key, state] : optimizer.state()) CHECK(static_cast<torch::optim::AdamWParamState&>(*state).step() == 1);
  }
  SECTION("a class without a kernel says so after a skip, too") {
    torch::optim::RMSprop optimizer(model->parameters(), torch::optim::RMSpropOptions(0.1));
    fill(INFINITY), update(optimizer, amp, fused);
    CHECK(fused.reason() == "torch::optim for all groups: the class of this optimizer has no fused kernel");
    CHECK(optimizer.state().empty());
  }
}

TEST_CASE("a double model keeps the scale in double, and a scale beyond float is no error") {
  const auto train = [](SkipDecision decision, double scale, double growth) {
    Net model = make(torch::kDouble);
    auto optimizer = adamw(model->parameters());
    FusedStep fused;
    auto amp = fp16(decision, {.init_scale = scale, .growth = growth, .growth_interval = 1, .max_scale = 1e60});
    for (int i = 0; i < 6; ++i) {
      amp.scale(MeanLoss()(model, cut(data(29, torch::kDouble), {8})[0])).backward();
      update(optimizer, amp, fused);
    }
    settle(optimizer, amp, fused);
    return std::pair{network::state_of(*model), amp.scale_factor()};
  };
  for (const auto& [scale, growth] : {std::pair{1024.0, 1.3}, std::pair{1e39, 2.0}}) {
    const auto exact = train(SkipDecision::exact, scale, growth), lagged = train(SkipDecision::lagged, scale, growth);
    CHECK(network::same_bits(exact.first, lagged.first));
    CHECK(exact.second == lagged.second);
  }
}

TEST_CASE("an exception in fit() leaves an open step booked on its own weights") {
  const auto train = [](SkipDecision decision) {
    Net model = make();
    auto optimizer = adamw(model->parameters());
    int calls = 0;
    const auto loss = [&](Net& net, const Batch& batch) {
      if (++calls == 5) throw std::runtime_error("a bad batch");
      return MeanLoss()(net, batch);
    };
    Trainer trainer{model, optimizer, loss, fp16(decision), FusedStep(), Averager({.decay = 0.5})};
    const auto batches = cut(data(29), sizes);
    CHECK_THROWS_WITH(trainer.fit(batches, {.epochs = 3}), "a bad batch");
    const State averaged = network::state_of(*model);
    CHECK(trainer.fit(batches, {.epochs = 3}).progress.step > 10);
    return std::pair{averaged, network::state_of(*model)};
  };
  const auto exact = train(SkipDecision::exact), lagged = train(SkipDecision::lagged);
  CHECK(network::same_bits(exact.first, lagged.first));
  CHECK(network::same_bits(exact.second, lagged.second));
}

TEST_CASE("a state that was loaded after a lagged step keeps its counts") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged);
  FusedStep fused;
  const auto step = [&](double gradient) {
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::full_like(parameter, gradient);
    return update(optimizer, amp, fused);
  };
  step(1), step(std::numeric_limits<double>::infinity());
  const auto count = [&]() -> std::int64_t {
    return static_cast<torch::optim::AdamWParamState&>(*optimizer.state().begin()->second).step();
  };
  for (auto& [key, state] : optimizer.state()) static_cast<torch::optim::AdamWParamState&>(*state).step(17);
  CHECK(settle(optimizer, amp, fused) == StepResult::skipped);
  CHECK(count() == 17);
  CHECK(settle(optimizer, amp, fused) == StepResult::accumulated);
}

namespace {
struct Sink {
  static void write(auto&&...) {}
};
}  // namespace

TEST_CASE("an unanswered step cannot be saved, and too many skips end the run one window later") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  const auto batches = cut(data(29), sizes);
  SECTION("saved") {
    AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged);
    FusedStep fused;
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    update(optimizer, amp, fused);
    Sink sink;
    CHECK_THROWS_WITH(amp.save(sink), ContainsSubstring("frugal::settle"));
    CHECK(amp.scale_factor() == 1024);  // asks
    settle(optimizer, amp, fused);
    amp.save(sink);
  }
  SECTION("not ended: the last skip that is allowed is followed by a step") {
    auto amp = fp16(SkipDecision::lagged, {.init_scale = 1024, .max_consecutive_skips = 2});
    Trainer trainer{model, optimizer, OverflowAt{MeanLoss{}, {1, 3}}, std::move(amp), FusedStep()};
    for (int i = 0; i < 6; ++i) CHECK(trainer.step(batches[0]) == StepResult::applied);
    CHECK(trainer.progress().step == 4);
  }
  SECTION("ended") {
    auto amp = fp16(SkipDecision::lagged, {.init_scale = 1024, .max_consecutive_skips = 2});
    Trainer trainer{model, optimizer, OverflowAt{MeanLoss{}, {1, 2}}, std::move(amp), FusedStep()};
    for (int i = 0; i < 3; ++i) CHECK(trainer.step(batches[0]) == StepResult::applied);
    const State before = network::state_of(*model);
    const bool asks = GENERATE(false, true);
    if (asks) CHECK_THROWS_WITH(trainer.progress(), ContainsSubstring("overflow number 2 in a row"));
    else CHECK_THROWS_WITH(trainer.step(batches[0]), ContainsSubstring("overflow number 2 in a row"));
    CHECK(network::same_bits(before, network::state_of(*model)));
    if (!asks)
      for (auto& parameter : model->parameters()) CHECK_FALSE(parameter.grad().defined());
    CHECK_FALSE(trainer.get<AmpPolicy<Fp16>>().unanswered());
    for (const auto& [key, state] : optimizer.state())
      CHECK(static_cast<const torch::optim::AdamWParamState&>(*state).step() == 1);
  }
}

TEST_CASE("two optimizers with lagged skips move the scale once for both") {
  const auto train = [](SkipDecision decision) {
    Net model = make();
    torch::optim::AdamW first = adamw(model->first->parameters()), second = adamw(model->second->parameters());
    AmpPolicy<Fp16> amp = fp16(decision);
    FusedStep fused;
    std::vector<double> trace;
    const auto batches = cut(data(29), sizes);
    OverflowAt loss{MeanLoss{}, {2, 5, 6}};
    for (std::size_t i = 0; i < 12; ++i) {
      amp.scale([&] {
           auto guard = amp.autocast();
           return loss(model, batches[i % 4]);
         }())
          .backward();
      if (i % 3 != 1) update(first, amp, fused);  // the gradients of the other one are those of two losses then
      if (i % 3 != 2) update(second, amp, fused);
    }
    settle(first, amp, fused), settle(second, amp, fused);
    return std::pair{network::state_of(*model), std::pair{amp.scale_factor(), amp.skipped()}};
  };
  const auto exact = train(SkipDecision::exact), lagged = train(SkipDecision::lagged);
  CHECK(network::same_bits(exact.first, lagged.first));
  CHECK(exact.second == lagged.second);
}

TEST_CASE("answers of two optimizers, and of two policies, are open each on their own") {
  Net model = make();
  auto first = adamw(model->first->parameters()), second = adamw(model->second->parameters());
  AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged), other_amp = fp16(SkipDecision::lagged);
  FusedStep fused, other_fused;
  const auto step = [&](auto& optimizer, auto&... policies) {
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    update(optimizer, policies...);
  };
  const auto guard = [&](auto& optimizer) { const StateGuard begun(model, optimizer); };
  const auto settle_first = ContainsSubstring("not known whether the last step was skipped");
  SECTION("two optimizers") {
    Averager average;
    step(second, amp, fused);
    CHECK_THROWS_WITH(average.update(model), settle_first);  // of whichever of its parameters it is
    step(first, amp, fused);
    CHECK_THROWS_WITH(guard(first), settle_first);
    CHECK_THROWS_WITH(guard(second), settle_first);
    CHECK(settle(second, amp, fused) == StepResult::applied);
    CHECK_THROWS_WITH(guard(first), settle_first);
    guard(second);
    CHECK(settle(first, amp, fused) == StepResult::applied);
    guard(first);
    average.update(model);
  }
  SECTION("two policies") {
    step(first, amp, fused);
    step(first, other_amp, other_fused);
    CHECK(settle(first, amp, fused) == StepResult::applied);
    CHECK_THROWS_WITH(guard(first), settle_first);
    CHECK(settle(first, other_amp, other_fused) == StepResult::applied);
    guard(first);
  }
}

TEST_CASE("calibrate() itself refuses while an answer of its policy is open, of whichever optimizer") {
  Net model = make(), other = make();
  auto optimizer = adamw(model->parameters()), of_another = adamw(other->parameters());
  AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged);
  FusedStep fused;
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  update(optimizer, amp, fused);
  CHECK_THROWS_WITH(calibrate(amp, model, optimizer, [] {}), ContainsSubstring("calibrate: called while"));
  CHECK_THROWS_WITH(calibrate(amp, other, of_another, [] {}), ContainsSubstring("calibrate: called while"));
  CHECK(settle(optimizer, amp, fused) == StepResult::applied);
}

TEST_CASE("settle() refuses the update policy of an earlier step, whatever that was") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged);
  FusedStep fused, another;
  const double gradient = GENERATE(1.0, std::numeric_limits<double>::infinity());
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::full_like(parameter, gradient);
  update(optimizer, amp, fused);
  settle(optimizer, amp, fused);
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  update(optimizer, amp, another);
  CHECK_THROWS_WITH(settle(optimizer, amp, fused), ContainsSubstring("Pass these two"));
  CHECK(settle(optimizer, amp, another) == StepResult::applied);
}

TEST_CASE("a group that falls back skips with the others") {
  Net model = make();
  torch::optim::AdamW optimizer(
      std::vector<OptimizerParamGroup>{model->first->parameters(), model->second->parameters()});
  AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged);
  FusedStep fused;
  const State before = network::state_of(*model);
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  model->second->weight.mutable_grad() = torch::full({8, 3}, INFINITY).t();
  CHECK(update(optimizer, amp, fused) == StepResult::applied);
  CHECK(fused.reason() == "torch::optim for group 1: a parameter and its gradient differ in strides");
  CHECK(network::same_bits(before, network::state_of(*model)));
  CHECK(settle(optimizer, amp, fused) == StepResult::skipped);
}

namespace {
struct StopsAtSkip {
  static constexpr Role role = Role::observer;
  bool skipped = false;
  void on_skip(const Progress&) { skipped = true; }
  StopReason stop() const { return skipped ? StopReason::diverged : StopReason::none; }
};
}  // namespace

TEST_CASE("an observer that stops over a skip stops where one with exact skips does") {
  for (const auto decision : {SkipDecision::exact, SkipDecision::lagged}) {
    Net model = make();
    auto optimizer = adamw(model->parameters());
    Trainer trainer{model, optimizer, OverflowAt{MeanLoss{}, {1}}, fp16(decision), FusedStep(), StopsAtSkip{}};
    const auto report = trainer.fit(cut(data(29), sizes), {.epochs = 3});
    CHECK(report.reason == StopReason::diverged);
    CHECK(report.progress.samples == 16);
    CHECK(report.progress.step == 1);
  }
}

TEST_CASE("fit() after steps by hand counts the last one first") {
  const Calls overflows = GENERATE(Calls{}, Calls{0});
  for (const auto decision : {SkipDecision::exact, SkipDecision::lagged}) {
    Net model = make();
    auto optimizer = adamw(model->parameters());
    const auto batches = cut(data(29), sizes);
    Trainer trainer{model, optimizer, OverflowAt{MeanLoss{}, overflows}, fp16(decision), FusedStep()};
    trainer.step(batches[0]);
    const CaughtWarnings over;
    const auto report = trainer.fit(batches, {.max_steps = 1});
    CHECK(report.progress.step == 1);
    CHECK(over.with("this run is over") == (overflows.empty() ? 1 : 0));
  }
}

TEST_CASE("restore_best() books an open step on its own weights") {
  const auto train = [](SkipDecision decision) {
    Net model = make();
    auto optimizer = adamw(model->parameters());
    const auto batches = cut(data(29), sizes);
    Trainer trainer{model,
                    optimizer,
                    MeanLoss{},
                    fp16(decision),
                    FusedStep(),
                    Averager({.decay = 0.5}),
                    EarlyStopper({.patience = 3})};
    trainer.step(batches[0]);
    trainer.check(Metrics(1.0));
    trainer.step(batches[1]);
    CHECK(trainer.restore_best());
    const State best = network::state_of(*model);
    trainer.template get<Averager>().swap(model);
    return std::pair{best, network::state_of(*model)};
  };
  const auto exact = train(SkipDecision::exact), lagged = train(SkipDecision::lagged);
  CHECK(network::same_bits(exact.first, lagged.first));
  CHECK(network::same_bits(exact.second, lagged.second));
}

TEST_CASE("an interrupted run hears of its last step before it saves") {
  const auto run = [](SkipDecision decision) {
    const TemporaryDirectory folder;
    Net model = make();
    auto optimizer = adamw(model->parameters());
    bool interrupted = false;
    int calls = 0;
    const auto interrupts = [&](Net& net, const Batch& batch) {
      interrupted = ++calls == 3;
      return MeanLoss()(net, batch);
    };
    std::vector<std::string> log;
    Trainer trainer{model,
                    optimizer,
                    OverflowAt{interrupts, {2}},
                    fp16(decision),
                    FusedStep(),
                    Interruption{&interrupted},
                    CheckpointManager<>({.directory = folder.path().string()}),
                    Seen{&log}};
    CHECK(trainer.fit(cut(data(29), sizes), {.epochs = 4}).reason == StopReason::preempted);
    return log;
  };
  CHECK(run(SkipDecision::exact) == std::vector<std::string>{"skip 1 after 2", "save after 3 batches"});
  CHECK(run(SkipDecision::lagged) == run(SkipDecision::exact));
}

TEST_CASE("calibrate() of a Trainer books the step before it, and leaves scale and skips alone") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  const auto batches = cut(data(29), {8});
  Trainer trainer{model, optimizer, OverflowAt{MeanLoss{}, {1}}, fp16(SkipDecision::lagged), FusedStep()};
  for (int i = 0; i < 2; ++i) CHECK(trainer.step(batches[0]) == StepResult::applied);
  const auto& amp = trainer.get<AmpPolicy<Fp16>>();
  CHECK(amp.unanswered());
  static_cast<void>(trainer.calibrate(batches[0], CalibrationOptions{.rounds = 3, .turn = 0}));
  CHECK_FALSE(amp.unanswered());
  CHECK(amp.scale_factor() == 512);
  CHECK(amp.skipped() == 1);
  CHECK(trainer.progress().step == 1);
  CHECK(trainer.progress().skipped == 1);
}

TEST_CASE("an exception in mid-epoch leaves an open step booked on its own weights") {
  const auto train = [](SkipDecision decision) {
    Net model = make();
    auto optimizer = adamw(model->parameters());
    int calls = 0;
    const auto loss = [&](Net& net, const Batch& batch) {
      if (++calls == 7) throw std::runtime_error("a bad batch");  // the third of the second epoch
      return MeanLoss()(net, batch);
    };
    Trainer trainer{model, optimizer, loss, fp16(decision), FusedStep(), Averager({.decay = 0.5})};
    CHECK_THROWS_WITH(trainer.fit(cut(data(29), sizes), {.epochs = 3}), "a bad batch");
    CHECK_FALSE(trainer.template get<AmpPolicy<Fp16>>().unanswered());
    return network::state_of(*model);
  };
  CHECK(network::same_bits(train(SkipDecision::exact), train(SkipDecision::lagged)));
}

TEST_CASE("optimizers that take turns with a loss each are scaled and skipped as with exact skips") {
  // what overflows when, by number of the loss
  const Calls overflows = GENERATE(Calls{}, Calls{1}, Calls{0, 1}, Calls{3, 4}, Calls{1, 5, 6, 9}, Calls{2, 8, 11});
  const std::size_t number = GENERATE(2U, 3U);
  const auto train = [&](SkipDecision decision) {
    std::vector<torch::Tensor> weights;
    std::vector<torch::optim::SGD> optimizers;
    for (std::size_t i = 0; i < number; ++i) {
      weights.push_back(torch::zeros({4}, torch::requires_grad()));
      optimizers.emplace_back(std::vector{weights.back()}, torch::optim::SGDOptions(1));
    }
    auto amp = fp16(decision, {.init_scale = 1024, .growth_interval = 2});
    FusedStep fused;
    std::vector<double> trace;
    for (std::int64_t call = 0; call < 12; ++call) {
      const auto turn = static_cast<std::size_t>(call) % number;
      const double factor = std::ranges::count(overflows, call) ? INFINITY : 1;
      if (backward(weights[turn].mul(factor).sum(), 1, amp)) update(optimizers[turn], amp, fused);
      for (const auto& weight : weights) trace.push_back(weight[0].item<double>());
    }
    for (auto& optimizer : optimizers) settle(optimizer, amp, fused);
    trace.push_back(amp.scale_factor());
    trace.push_back(static_cast<double>(amp.skipped()));
    return trace;
  };
  CHECK(train(SkipDecision::exact) == train(SkipDecision::lagged));
}

TEST_CASE("a step by hand is refused while an answer is open") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged);
  FusedStep fused;
  const auto fill = [&] {
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  };
  fill(), update(optimizer, amp, fused), fill();
  const auto settle_first = ContainsSubstring("not known whether the last step was skipped");
  CHECK_THROWS_WITH(fused.step(optimizer), settle_first);
  CHECK_THROWS_WITH(amp.step(optimizer), settle_first);
  CHECK(settle(optimizer, amp, fused) == StepResult::applied);
  fused.step(optimizer);
}

TEST_CASE("an answer that nobody can give any more is no obstacle") {
  AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged);
  FusedStep fused;
  const auto train = [&](auto& model, double gradient) {
    auto optimizer = adamw(model->parameters());
    const StateGuard guard(model, optimizer);
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::full_like(parameter, gradient);
    static_cast<void>(amp.scale(torch::ones({})));
    update(optimizer, amp, fused);
  };
  SECTION("models come and go, at the same addresses") {
    for (int i = 0; i < 20; ++i) {
      torch::nn::Linear model(2, 2);
      train(model, i % 5 == 0 ? INFINITY : 1);
      CHECK(amp.unanswered());
    }
    CHECK_FALSE(amp.unanswered());
    Sink sink;
    amp.save(sink);
    CHECK(amp.skipped() == 4);
  }
  SECTION("another optimizer takes the model over") {
    Net model = make();
    train(model, 1);
    auto second = adamw(model->parameters());
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    CHECK_THROWS_WITH(update(second, amp, fused), ContainsSubstring("amp.answer(optimizer)"));
    CHECK(amp.unanswered(second));
    CHECK(amp.answer(second));
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    update(second, amp, fused);
    CHECK(settle(second, amp, fused) == StepResult::applied);
  }
  SECTION("an optimizer without parameters") {
    Net model = make();
    auto empty = adamw(model->parameters()), other = adamw(model->parameters());
    empty.param_groups().clear(), other.param_groups().clear();
    update(empty, amp, fused);
    const StateGuard guard(model, other);
    CHECK(settle(empty, amp, fused) == StepResult::applied);
  }
  SECTION("a state in full precision is loaded") {
    const Capability v100{.device = at::kCUDA, .major = 7};
    AmpPolicy<> measured(at::kCUDA, v100), automatic(at::kCUDA, v100, {.skip_decision = SkipDecision::lagged});
    frugal::detail::Snapshot state;
    measured.become({Precision::fp32, "fp32: measured."}, frugal::detail::Chosen::by_measuring);
    measured.save(state);
    Net model = make();
    auto optimizer = adamw(model->parameters());
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    update(optimizer, automatic, fused);
    REQUIRE(automatic.unanswered());
    automatic.load(state);
    const StateGuard guard(model, optimizer);
  }
}

TEST_CASE("a lagged step that throws leaves nothing open") {
  Net model = make();
  torch::optim::AdamW optimizer(
      std::vector<OptimizerParamGroup>{model->first->parameters(), model->second->parameters()});
  const auto batches = cut(data(29), {8});
  bool sparse = false;  // which torch::optim::AdamW refuses, when the first group has been stepped
  const auto loss = [&](Net& net, const Batch& batch) {
    if (!sparse) return MeanLoss()(net, batch);
    net->second->weight.mutable_grad() = torch::zeros_like(net->second->weight).to_sparse();
    return net->first->weight.sum();
  };
  Trainer trainer{model, optimizer, loss, fp16(SkipDecision::lagged), FusedStep(), Averager({.decay = 0.5})};
  for (int i = 0; i < 2; ++i) CHECK(trainer.step(batches[0]) == StepResult::applied);
  sparse = true;
  CHECK_THROWS(trainer.step(batches[0]));
  sparse = false;
  CHECK(trainer.progress().step == 2);
  CHECK_FALSE(trainer.get<AmpPolicy<Fp16>>().unanswered());
  const auto count = [&](const torch::Tensor& parameter) -> std::int64_t {
    return static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl())).step();
  };
  CHECK(count(model->first->weight) == 3);  // half done, as with torch::optim
  const StateGuard guard(model, optimizer);
  trainer.get<Averager>().swap(model), trainer.get<Averager>().swap(model);
  CHECK(trainer.step(batches[0]) == StepResult::applied);
  CHECK(trainer.progress().step == 3);
}

TEST_CASE("restart() and resume() after too many skips begin a new run") {
  const TemporaryDirectory folder;
  Net model = make();
  auto optimizer = adamw(model->parameters());
  const auto batches = cut(data(29), {8});
  auto amp = fp16(SkipDecision::lagged, {.init_scale = 1024, .max_consecutive_skips = 2});
  Trainer trainer{model,          optimizer,   OverflowAt{MeanLoss{}, {0, 1}},
                  std::move(amp), FusedStep(), CheckpointManager<>({.directory = folder.path().string()})};
  SECTION("from a checkpoint") {
    trainer.save();
    for (int i = 0; i < 2; ++i) CHECK(trainer.step(batches[0]) == StepResult::applied);
    CHECK(trainer.resume());
  }
  SECTION("where there is none, resume() leaves it at the error") {
    for (int i = 0; i < 2; ++i) CHECK(trainer.step(batches[0]) == StepResult::applied);
    CHECK_THROWS_WITH(trainer.resume(), ContainsSubstring("overflow number 2 in a row"));
    trainer.restart();
  }
  SECTION("a new one") {
    for (int i = 0; i < 2; ++i) CHECK(trainer.step(batches[0]) == StepResult::applied);
    trainer.restart();
  }
  CHECK(trainer.progress().skipped == 0);
  CHECK(trainer.step(batches[0]) == StepResult::applied);
  CHECK(trainer.progress().step == 1);
  CHECK(trainer.get<AmpPolicy<Fp16>>().scale_factor() == 1024);
}

TEST_CASE("a step whose answer somebody asked for says what it was") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  const auto batches = cut(data(29), {8});
  std::vector<std::string> log;
  Trainer trainer{model,       optimizer,       OverflowAt{MeanLoss{}, {1}}, fp16(SkipDecision::lagged),
                  FusedStep(), Seen{&log, true}};
  CHECK(trainer.step(batches[0]) == StepResult::applied);
  CHECK(trainer.step(batches[0]) == StepResult::skipped);
  CHECK(trainer.step(batches[0]) == StepResult::applied);
}

TEST_CASE("the reason says that skips are late, after a calibration too, and not where nothing is skipped") {
  const auto late = ContainsSubstring("Where FusedStep steps, skips are learned late.");
  Net model = make();
  auto optimizer = adamw(model->parameters());
  AmpPolicy<> amp(at::kCUDA, Capability{.device = at::kCUDA, .major = 7}, {.skip_decision = SkipDecision::lagged});
  CHECK_THAT(amp.reason(), late);
  amp.become({Precision::fp16, "fp16, measured."}, frugal::detail::Chosen::by_measuring);
  CHECK(amp.reason() == "fp16, measured. Where FusedStep steps, skips are learned late.");
  amp.become({Precision::fp32, "fp32, measured."}, frugal::detail::Chosen::by_measuring);
  CHECK(amp.reason() == "fp32, measured.");
  CHECK_THAT(fp16(SkipDecision::exact).reason(), !late);
}

TEST_CASE("calibrate() in a loop of your own takes steps that leave their answer open") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  const auto batch = cut(data(29), {8})[0];
  AmpPolicy<Fp16> amp = fp16(SkipDecision::lagged);
  FusedStep fused;
  GradAccumulator accumulator(2);
  const auto window = [&] {
    for (bool full = false; !full;) {
      const auto loss = [&] {
        const auto guard = amp.autocast();
        return MeanLoss()(model, batch);
      }();
      full = backward(loss, 8, amp, accumulator);
    }
    update(optimizer, amp, accumulator, fused);
  };
  const State before = network::state_of(*model);
  CHECK(calibrate(amp, model, optimizer, window, {.rounds = 3, .turn = 0}).ways.size() > 1);
  CHECK(network::same_bits(before, network::state_of(*model)));
  CHECK_FALSE(amp.unanswered());
  CHECK(optimizer.state().empty());
  window();
  CHECK(settle(optimizer, amp, fused) == StepResult::applied);
}

TEST_CASE("a policy that becomes another one waits for no answer") {
  Net model = make();
  auto optimizer = adamw(model->parameters());
  AmpPolicy<> amp(at::kCUDA, Capability{.device = at::kCUDA, .major = 7}, {.skip_decision = SkipDecision::lagged});
  FusedStep fused;
  const auto step = [&] {
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    return update(optimizer, amp, fused);
  };
  step();
  REQUIRE(amp.unanswered());
  amp.become({Precision::fp32, "fp32, measured."}, frugal::detail::Chosen::by_measuring);
  CHECK(step() == StepResult::applied);
}
