#include "support/catch.hpp"
#include "support/fakes.hpp"

#include <frugal/early_stopper.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/trainer.hpp>

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using namespace frugal;
using fakes::Batch;
using fakes::Log;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

struct Run {
  Log log;
  fakes::Model model{.log = nullptr};
  fakes::Optimizer optimizer{model};
  std::vector<Batch> batches{{1, 4}, {2, 4}, {3, 4}, {4, 4}};

  void record() { model.log = &log; }
  auto trainer(auto... policies) { return Trainer{model, optimizer, fakes::mean_loss, std::move(policies)...}; }
};

// Writes down every call.
struct Recorder {
  static constexpr Role role = Role::observer;
  Log* log;
  void on_gradients(fakes::Model&) { log->push_back("on_gradients"); }
  void on_step(const Progress& at) { log->push_back("on_step " + std::to_string(at.step)); }
  void on_skip(const Progress& at) { log->push_back("on_skip " + std::to_string(at.skipped)); }
  void on_epoch(const Progress& at) { log->push_back("on_epoch " + std::to_string(at.epoch)); }
};

struct Schedule {
  static constexpr Role role = Role::schedule;
  Log* log;
  void apply(auto&, std::int64_t step) { log->push_back("rate " + std::to_string(step)); }
};

struct Averager {
  static constexpr Role role = Role::averaging;
  double average = 0;
  bool any = false, in = false;
  void update(fakes::Model& model) { average = model.weight + 1000, any = true; }
  void swap(fakes::Model& model) { std::swap(model.weight, average), in = !in; }
  bool averaging() const { return any; }
  bool swapped() const { return in; }
  void save(auto& out) const { out.write("average", average); }
  void load(auto& in) { in.read("average", average); }
  void reset() { any = in = false; }
};

// The weights' scale never moves; the given windows, counted from 0, overflow.
struct OverflowsAt {
  static constexpr Role role = Role::precision;
  static constexpr bool can_skip = true;
  std::vector<int> windows;
  int window = 0;
  int autocast() { return 0; }
  auto& scale(auto& loss) { return loss; }
  void unscale(auto& optimizer, double factor) {
    if (factor != 1) optimizer.multiply_gradients(factor);
  }
  bool step(auto& optimizer) {
    for (const int bad : windows)
      if (bad == window) return ++window, false;
    return ++window, optimizer.step(), true;
  }
};

struct Checkpoints {
  static constexpr Role role = Role::checkpointing;
  Log* log;
  std::int64_t every_steps = 0;
  bool due(const Progress& at) const { return at.micro_batch == 0 || (every_steps > 0 && at.step % every_steps == 0); }
  void save(const Progress& at, auto&, auto&, auto&... stateful) {
    log->push_back("save " + std::to_string(at.epoch) + "." + std::to_string(at.micro_batch) + " with " +
                   std::to_string(sizeof...(stateful)));
  }
  std::optional<Progress> restore(auto&, auto&, auto&...) { return std::nullopt; }
  void wait() { log->push_back("wait"); }
};

struct Interruption {
  static constexpr Role role = Role::interruption;
  const bool* flag;
  bool requested() const { return *flag; }
};

struct StopsAt {
  static constexpr Role role = Role::observer;
  std::int64_t* step;
  std::int64_t now = 0;
  void on_step(const Progress& at) { now = at.step; }
  StopReason stop() const { return now >= *step ? StopReason::budget : StopReason::none; }
};

struct Plateau {
  static constexpr Role role = Role::schedule;
  double rate = 1;
  void apply(fakes::Optimizer& optimizer, std::int64_t) { optimizer.rate = rate; }
  void observe(double) { rate /= 10; }
};

struct Publishes {
  static constexpr Role role = Role::clipping;
  int* asked;
  void clip(auto&) {}
  void readings(auto& out) const { ++*asked, out.write("norm", 7.0); }
};

struct Phases {
  static constexpr Role role = Role::observer;
  std::vector<Phase>* seen;
  void on_phase(Phase phase) { seen->push_back(phase); }
};

struct Lbfgs {
  fakes::Model& model;
  void step(auto&& closure) {
    for (int i = 0; i < 3; ++i) closure(), model.weight -= model.gradient;
  }
  void zero_grad() { model.gradient = 0; }
};

struct Positioned {
  Log* log;
  std::vector<Batch> epoch(std::int64_t epoch, std::int64_t consumed) const {
    log->push_back(std::to_string(epoch) + " from " + std::to_string(consumed));
    return std::vector<Batch>(static_cast<std::size_t>(3 - consumed));
  }
};

}  // namespace

TEST_CASE("one step without policies is forward, backward, step, zero_grad") {
  Run run;
  auto trainer = run.trainer();
  run.record();
  CHECK(trainer.step(Batch{3, 5}) == StepResult::applied);
  CHECK(run.log == Log{"zero_grad", "forward", "backward", "step", "zero_grad"});  // the first: no stale gradient
  run.log.clear();
  trainer.step(Batch{1, 5});
  CHECK(run.log == Log{"forward", "backward", "step", "zero_grad"});
  CHECK(run.model.weight == -4);
  CHECK(trainer.progress().step == 2);
  CHECK(trainer.progress().samples == 10);
  CHECK(trainer.progress().loss == 1);
}

TEST_CASE("a gradient from before the run is not stepped on") {
  Run run;
  run.model.gradient = 100;
  auto trainer = run.trainer();
  trainer.step(Batch{3, 5});
  CHECK(run.model.weight == -3);
}

TEST_CASE("an epoch happens in the documented order") {
  Run run;
  bool requested = false;
  auto trainer = run.trainer(Recorder{&run.log}, Checkpoints{&run.log}, Schedule{&run.log}, GradAccumulator(2),
                             Interruption{&requested}, EarlyStopper());
  run.record();
  const auto report = trainer.fit(run.batches, [&] { return run.log.push_back("validate"), 1.0; });
  CHECK(run.log == Log{"zero_grad",  "rate 0",          "train",     "forward",   "backward",     "forward",
                       "backward",   "on_gradients",    "step",      "zero_grad", "rate 1",       "on_step 1",
                       "forward",    "backward",        "forward",   "backward",  "on_gradients", "step",
                       "zero_grad",  "rate 2",          "on_step 2", "eval",      "validate",     "train",
                       "on_epoch 1", "save 1.0 with 3", "wait"});
  CHECK(report.reason == StopReason::finished);
  CHECK(report.progress.epoch == 1);
  CHECK(report.progress.micro_batch == 0);
  CHECK(report.progress.samples == 16);
  CHECK(report.progress.metric_step == 2);
  CHECK(report.exit_code() == 0);
}

TEST_CASE("the last window of an epoch is flushed, or carried into the next") {
  Run run;
  run.batches.pop_back();  // 3 micro-batches, windows of 2
  SECTION("flush") {
    auto trainer = run.trainer(GradAccumulator(2));
    CHECK(trainer.fit(run.batches, {.epochs = 2}).progress.step == 4);
    CHECK(run.optimizer.seen == std::vector<double>{1.5, 3, 1.5, 3});
  }
  SECTION("carry: only the end of training flushes") {
    auto trainer = run.trainer(GradAccumulator({.steps = 2, .at_epoch_end = AtEpochEnd::carry}));
    CHECK(trainer.fit(run.batches, {.epochs = 3}).progress.step == 5);
    CHECK(run.optimizer.seen == std::vector<double>{1.5, 2, 2.5, 1.5, 3});
  }
  SECTION("carry: a stop in between flushes too") {
    auto trainer =
        run.trainer(GradAccumulator({.steps = 2, .at_epoch_end = AtEpochEnd::carry}), EarlyStopper({.target = 0.0}));
    CHECK(trainer.fit(run.batches, [] { return 0; }, {.epochs = 3}).reason == StopReason::target_reached);
    CHECK(run.optimizer.seen == std::vector<double>{1.5, 3});
  }
}

TEST_CASE("the reported loss is the window's weighted mean") {
  Run run;
  auto trainer = run.trainer(GradAccumulator(2));
  trainer.step(Batch{1, 10});
  CHECK(std::isnan(trainer.progress().loss));
  trainer.step(Batch{4, 30});
  CHECK(trainer.progress().loss == Approx((10 + 120) / 40.0));
  trainer.step(Batch{not_a_number, 0});
  trainer.step(Batch{5, 2});
  CHECK(trainer.progress().loss == Approx(5));
}

TEST_CASE("a window of nothing is no step, no skip, and leaves the loss alone") {
  Run run;
  auto trainer = run.trainer(GradAccumulator(2));
  CHECK(trainer.step(Batch{not_a_number, 0}) == StepResult::accumulated);
  CHECK(trainer.step(Batch{not_a_number, 0}) == StepResult::accumulated);
  CHECK(trainer.flush() == StepResult::accumulated);
  CHECK(trainer.progress().step == 0);
  CHECK(trainer.progress().skipped == 0);
  CHECK(trainer.progress().micro_batch == 2);
  CHECK(run.optimizer.seen.empty());
}

TEST_CASE("an overflow advances nothing but the count of skips") {
  Run run;
  auto trainer = run.trainer(OverflowsAt{{1}}, Recorder{&run.log}, Schedule{&run.log}, Averager{});
  CHECK(trainer.step(Batch{1, 1}) == StepResult::applied);
  run.log.clear();
  CHECK(trainer.step(Batch{1, 1}) == StepResult::skipped);
  CHECK(run.log == Log{"on_gradients", "on_skip 1"});
  CHECK(trainer.progress().step == 1);
  CHECK(trainer.progress().skipped == 1);
  CHECK(trainer.template get<Averager>().average == 999);
}

TEST_CASE("max_steps counts from the start of the run and ends it finished and validated") {
  Run run;
  int validations = 0;
  auto trainer = run.trainer();
  auto validate = [&] { return ++validations; };
  auto report = trainer.fit(run.batches, validate, {.epochs = 0, .max_steps = 6});
  CHECK(report.progress.step == 6);
  CHECK(report.progress.epoch == 1);
  CHECK(report.progress.micro_batch == 2);
  CHECK(report.reason == StopReason::finished);
  CHECK(validations == 2);
  CHECK(report.progress.metric_step == 6);
  report = trainer.fit(run.batches, validate, {.epochs = 0, .max_steps = 8});  // continues inside the epoch
  CHECK(run.optimizer.seen == std::vector<double>{1, 2, 3, 4, 1, 2, 3, 4});
}

TEST_CASE("validation every n steps replaces the one per epoch") {
  Run run;
  std::vector<std::int64_t> validated_at;
  auto trainer = run.trainer();
  auto validate = [&] { return validated_at.push_back(trainer.progress().step), 0; };
  trainer.fit(run.batches, validate, {.epochs = 2, .validate_every_steps = 3});
  CHECK(validated_at == std::vector<std::int64_t>{3, 6, 8});  // the last: the weights that remain
}

TEST_CASE("a run that is over returns at once with its reason; restart begins a new one") {
  Run run;
  auto trainer = run.trainer(EarlyStopper({.patience = 1}), GradAccumulator(1));
  auto same = [] { return 1.0; };
  CHECK(trainer.fit(run.batches, same, {.epochs = 9}).reason == StopReason::plateau);
  const auto steps = run.optimizer.seen.size();
  CHECK(trainer.fit(run.batches, same, {.epochs = 9}).reason == StopReason::plateau);
  CHECK(run.optimizer.seen.size() == steps);
  trainer.restart();
  CHECK(trainer.progress().step == 0);
  CHECK(trainer.fit(run.batches, same, {.epochs = 1}).reason == StopReason::finished);
  CHECK(run.optimizer.seen.size() == steps + 4);
  CHECK(trainer.fit(run.batches, same, {.epochs = 1}).reason == StopReason::finished);
  CHECK(run.optimizer.seen.size() == steps + 4);
}

TEST_CASE("an interruption stops after the micro-batch, saves, and keeps the window open") {
  Run run;
  bool requested = false;
  auto trainer = run.trainer(GradAccumulator(2), Interruption{&requested}, Checkpoints{&run.log},
                             OnStep{[&](const Progress& at) { requested = at.step == 1; }});
  auto report = trainer.fit(run.batches, {.epochs = 3});
  CHECK(report.reason == StopReason::preempted);
  CHECK(report.exit_code() == 75);
  CHECK(report.progress.micro_batch == 2);
  CHECK(run.log == Log{"save 0.2 with 2", "wait"});
  run.log.clear();
  requested = true;  // still, at the next start: nothing is trained, nothing is lost
  CHECK(trainer.fit(run.batches, {.epochs = 3}).reason == StopReason::preempted);
  CHECK(run.optimizer.seen.size() == 1);
}

TEST_CASE("an interruption at the end of the last epoch is a finished run") {
  Run run;
  bool requested = false;
  auto trainer = run.trainer(Interruption{&requested}, OnEpoch{[&](const Progress&) { requested = true; }});
  CHECK(trainer.fit(run.batches).reason == StopReason::finished);
}

TEST_CASE("a validation that the interruption cut short does not count") {
  Run run;
  bool requested = false;
  auto trainer = run.trainer(Interruption{&requested}, EarlyStopper(), Checkpoints{&run.log});
  auto validate = [&](const Interruption& interruption) {
    requested = true;
    return interruption.requested() ? -1e9 : 1.0;
  };
  auto report = trainer.fit(run.batches, validate, {.epochs = 3});
  CHECK(report.reason == StopReason::preempted);
  CHECK(report.progress.epoch == 0);
  CHECK(report.progress.micro_batch == 4);
  CHECK(report.progress.metric_step == -1);
  CHECK(trainer.template get<EarlyStopper>().best_at() == -1);
  CHECK(run.log == Log{"save 0.4 with 2", "wait"});
}

TEST_CASE("an observer may ask to stop") {
  Run run;
  std::int64_t at = 2;
  auto trainer = run.trainer(StopsAt{&at});
  const auto report = trainer.fit(run.batches, {.epochs = 3});
  CHECK(report.reason == StopReason::budget);
  CHECK(report.progress.step == 2);
  CHECK(report.exit_code() == 0);
}

TEST_CASE("the average is validated, the training weights come back, and the average stays at the end") {
  Run run;
  auto trainer = run.trainer(Averager{});
  std::vector<double> validated;
  trainer.fit(run.batches, [&] { return validated.push_back(run.model.weight), 0; }, {.epochs = 2});
  CHECK(run.optimizer.seen == std::vector<double>{1, 2, 3, 4, 1, 2, 3, 4});
  CHECK(validated == std::vector<double>{990, 980});
  CHECK(run.model.weight == 980);
  SECTION("a longer fit goes on with the training weights") {
    trainer.fit(run.batches, {.epochs = 3});
    CHECK(run.model.weight == 970);
  }
  SECTION("an exception leaves no average behind that a next step would train") {
    auto fails = [](fakes::Model& model, const Batch&) -> fakes::Loss {
      throw std::runtime_error(std::to_string(model.weight));
    };
    Trainer failing{run.model, run.optimizer, fails, Averager{}};
    CHECK_THROWS_WITH(failing.fit(run.batches), ContainsSubstring("980"));
    trainer.step(Batch{1, 1});
    CHECK(run.model.weight == -21);
  }
}

TEST_CASE("an exception of validate leaves the model in training mode") {
  Run run;
  auto trainer = run.trainer(Averager{});
  CHECK_THROWS_WITH(trainer.fit(run.batches, []() -> double { throw std::runtime_error("validation"); }), "validation");
  CHECK(run.model.training);
}

TEST_CASE("check is a validation for loops that somebody else owns") {
  Run run;
  auto trainer = run.trainer(EarlyStopper({.patience = 1}), Checkpoints{&run.log, 1});
  trainer.step(Batch{1, 1});
  CHECK(trainer.check(3.0) == StopReason::none);
  CHECK(trainer.check({{"loss", 4.0}, {"accuracy", 0.1}}) == StopReason::plateau);
  CHECK(trainer.progress().metric == 4.0);
  CHECK(trainer.progress().metric_step == 1);
  CHECK(run.log.size() == 2);
}

TEST_CASE("a schedule that observes changes the rate of the very next step") {
  Run run;
  auto trainer = run.trainer(Plateau{});
  trainer.fit(run.batches, [] { return 1; }, {.epochs = 1});
  CHECK(run.optimizer.rate == Approx(0.1));
}

TEST_CASE("readings reach a hook that takes them, metrics included, and are collected only then") {
  Run run;
  int asked = 0;
  std::vector<double> seen;
  auto trainer = run.trainer(Publishes{&asked}, OnStep{[](const Progress&, const Readings&) {}},
                             OnEpoch{[&](const Progress&, const Readings& now) {
                               seen = {now.find("norm").value(), now.find("accuracy").value()};
                             }});
  trainer.fit(run.batches, [] { return Metrics{{"loss", 1.0}, {"accuracy", 0.5}}; });
  CHECK(seen == std::vector<double>{7.0, 0.5});
  CHECK(asked == 1);
}

TEST_CASE("OnStep keeps its pace and sees a fresh loss") {
  Run run;
  std::vector<std::pair<std::int64_t, double>> seen;
  auto trainer = run.trainer(OnStep{[&](const Progress& at) { seen.emplace_back(at.step, at.loss); }, 3});
  trainer.fit(run.batches, {.epochs = 2});
  CHECK(seen == std::vector<std::pair<std::int64_t, double>>{{3, 3.0}, {6, 2.0}});
}

TEST_CASE("phases are announced in the order of the loop") {
  using enum Phase;
  Run run;
  run.batches.resize(1);
  std::vector<Phase> seen;
  Log ignored;
  auto trainer = run.trainer(Phases{&seen}, Checkpoints{&ignored});
  trainer.fit(run.batches, [] { return 0; });
  CHECK(seen == std::vector<Phase>{data, forward, backward, update, data, validation, save});
}

TEST_CASE("batches that can start anywhere are asked for the rest of the epoch") {
  Run run;
  auto trainer = run.trainer();
  trainer.fit(Positioned{&run.log}, {.epochs = 0, .max_steps = 4});
  trainer.fit(Positioned{&run.log}, {.epochs = 2});
  CHECK(run.log == Log{"0 from 0", "1 from 0", "1 from 1"});
}

TEST_CASE("options that make no sense, and batches that are empty, are errors before anything happens") {
  Run run;
  auto trainer = run.trainer();
  CHECK_THROWS_WITH(trainer.fit(run.batches, {.epochs = 0}), ContainsSubstring("nothing would ever end"));
  CHECK_THROWS_WITH(trainer.fit(run.batches, {.epochs = -1}), ContainsSubstring("negative"));
  CHECK_THROWS_WITH(trainer.fit(run.batches, {.validate_every_steps = 5}), ContainsSubstring("no validation"));
  CHECK_THROWS_WITH(trainer.fit(std::vector<Batch>{}), ContainsSubstring("epoch 0 has no batches"));
  CHECK(trainer.progress().step == 0);
}

TEST_CASE("the weight of a batch is found in its type") {
  struct Tensor {  // looks like one
    std::int64_t rows;
    std::int64_t size(std::int64_t) const { return rows; }
    std::int64_t dim() const { return 2; }
  };
  struct Example { Tensor data, target; };
  using detail::samples_in, detail::can_count;
  CHECK(samples_in(Batch{1, 7}) == 7);
  CHECK(samples_in(Tensor{5}) == 5);
  CHECK(samples_in(Example{{6}, {6}}) == 6);
  CHECK(samples_in(std::pair{Tensor{4}, 3}) == 4);
  CHECK(samples_in(std::tuple{std::pair{Tensor{4}, 3}, 2}) == 4);
  CHECK(samples_in(std::vector{Tensor{3}, Tensor{9}}) == 3);
  CHECK(samples_in(std::vector{Example{{1}, {1}}, Example{{1}, {1}}}) == 2);
  STATIC_REQUIRE(!can_count<std::vector<float>>());
  STATIC_REQUIRE(!can_count<std::string>());
  STATIC_REQUIRE(!can_count<int>());
}

namespace text {
struct Tokens {
  std::int64_t tokens, sentences;
  std::int64_t size() const { return sentences; }
};
double batch_weight(const Tokens& batch) { return static_cast<double>(batch.tokens); }
}  // namespace text

TEST_CASE("batch_weight wins over the size, Weighted over both, and samples stay samples") {
  Run run;
  auto loss = [](fakes::Model& model, const text::Tokens& batch) {
    return fakes::Loss{static_cast<double>(batch.tokens), &model};
  };
  Trainer by_token{run.model, run.optimizer, loss, GradAccumulator(2)};
  by_token.step(text::Tokens{10, 1});
  by_token.step(text::Tokens{30, 1});
  CHECK(run.optimizer.seen.back() == Approx((100 + 900) / 40.0));
  CHECK(by_token.progress().samples == 2);

  auto weighted = [&](fakes::Model& model, const text::Tokens& batch) { return Weighted{loss(model, batch), 1}; };
  Trainer evenly{run.model, run.optimizer, weighted, GradAccumulator(2)};
  evenly.step(text::Tokens{10, 5});
  evenly.step(text::Tokens{30, 5});
  CHECK(run.optimizer.seen.back() == Approx(20));
  CHECK(evenly.progress().samples == 10);
}

TEST_CASE("an optimizer that needs a closure evaluates the batch as often as it likes") {
  Run run;
  Lbfgs optimizer{run.model};
  int evaluations = 0;
  auto loss = [&](fakes::Model& model, const Batch& batch) { return ++evaluations, fakes::mean_loss(model, batch); };
  Trainer trainer{run.model, optimizer, loss, EarlyStopper(), Recorder{&run.log}};
  CHECK(trainer.step(Batch{2, 4}) == StepResult::applied);
  CHECK(evaluations == 3);
  CHECK(run.model.weight == -6);
  CHECK(trainer.progress().loss == 2);
  CHECK(trainer.step(Batch{not_a_number, 0}) == StepResult::accumulated);
  CHECK(run.model.weight == -6);
  CHECK(run.log == Log{"on_gradients", "on_step 1"});
}
