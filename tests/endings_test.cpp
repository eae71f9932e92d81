#include "support/catch.hpp"
#include "support/fakes.hpp"

#include <frugal/early_stopper.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/trainer.hpp>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace frugal;
using fakes::Batch;

// How a run ends, and what it still owes when an exception ended a fit().

namespace {

struct Run {
  fakes::Model model{.log = nullptr};
  fakes::Optimizer optimizer{model};
  std::vector<Batch> batches{{1, 4}, {2, 4}, {3, 4}, {4, 4}};
  std::vector<std::int64_t> checks;  // the steps that were validated

  auto trainer(auto... policies) { return Trainer{model, optimizer, fakes::mean_loss, std::move(policies)...}; }
  auto validate(auto& trainer) {
    return [&] { return checks.push_back(trainer.progress().step), 1.0; };
  }
};

// Saves are noted as epoch.micro_batch; the first `failing` waits find that the disk was full.
struct Checkpoints {
  static constexpr Role role = Role::checkpointing;
  std::vector<std::string>* saves;
  std::int64_t every_steps = 0;
  int failing = 0;
  bool due(const Progress& at) const { return at.micro_batch == 0 || (every_steps > 0 && at.step % every_steps == 0); }
  void save(const Progress& at, auto&, auto&, auto&...) {
    saves->push_back(std::to_string(at.epoch) + "." + std::to_string(at.micro_batch));
  }
  std::optional<Progress> restore(auto&, auto&, auto&...) { return std::nullopt; }
  void wait() {
    if (failing-- > 0) throw std::runtime_error("disk full");
  }
};
using Saves = std::vector<std::string>;
using Checks = std::vector<std::int64_t>;

struct StopsAt {
  static constexpr Role role = Role::observer;
  std::int64_t step;
  StopReason reason;
  std::int64_t now = 0;
  void on_step(const Progress& at) { now = at.step; }
  StopReason stop() const { return now >= step ? reason : StopReason::none; }
};

// Every window overflows.
struct Overflows {
  static constexpr Role role = Role::precision;
  static constexpr bool can_skip = true;
  int autocast() { return 0; }
  auto& scale(auto& loss) { return loss; }
  void unscale(auto&, double) {}
  bool step(auto&) { return false; }
};

struct ThrowsOnce {
  static constexpr Role role = Role::observer;
  enum Where { gradients, step, skip, epoch, update } where;
  std::int64_t at = 1;
  bool thrown = false;
  void on_gradients(fakes::Model&) { maybe(gradients, at); }
  void on_step(const Progress& now) { maybe(step, now.step); }
  void on_skip(const Progress& now) { maybe(skip, now.skipped); }
  void on_epoch(const Progress& now) { maybe(epoch, now.epoch); }
  void on_phase(Phase phase) {
    if (phase == Phase::update) maybe(update, at);
  }
  void maybe(Where here, std::int64_t now) {
    if (here == where && now == at && !std::exchange(thrown, true)) throw std::runtime_error("observer");
  }
};

}  // namespace

TEST_CASE("a run that ends as it should has its last weights validated, whatever ended it; every end is saved") {
  struct Row {
    StopReason reason;
    Checks checks;
    int exit_code;
  };
  for (const auto& row :
       {Row{StopReason::finished, {2}, 0}, Row{StopReason::budget, {2}, 0}, Row{StopReason::plateau, {2}, 0},
        Row{StopReason::target_reached, {2}, 0}, Row{StopReason::diverged, {}, 1}, Row{StopReason::non_finite, {}, 1},
        Row{StopReason::preempted, {}, 75}}) {
    INFO(to_string(row.reason));
    Run run;
    Saves saves;
    auto trainer = run.trainer(StopsAt{2, row.reason}, Checkpoints{&saves});
    for (int i = 0; i < 2; ++i) {  // the second fit() finds a run that is over
      const RunReport report = trainer.fit(run.batches, run.validate(trainer), {.epochs = 3});
      CHECK(report.reason == row.reason);
      CHECK(report.exit_code() == row.exit_code);
      CHECK(report.progress.step == 2);
      CHECK(run.checks == row.checks);
      CHECK(saves == Saves{"0.2"});
    }
  }
}

TEST_CASE("a run that the stopping policy ends has had its check; the last check of another may be its verdict") {
  Run run;
  SECTION("no second check, although a carried window was stepped on") {
    auto trainer =
        run.trainer(GradAccumulator({.steps = 3, .at_epoch_end = AtEpochEnd::carry}), EarlyStopper({.target = 1.0}));
    CHECK(trainer.fit(run.batches, run.validate(trainer), {.epochs = 3}).reason == StopReason::target_reached);
    CHECK(trainer.progress().step == 2);
    CHECK(run.checks == Checks{1});
  }
  SECTION("the target is reached with the last step that is allowed") {
    auto trainer = run.trainer(EarlyStopper({.target = 1.0}));
    for (int i = 0; i < 2; ++i)
      CHECK(trainer.fit(run.batches, run.validate(trainer), {.epochs = 0, .max_steps = 3}).reason ==
            StopReason::target_reached);
    CHECK(run.checks == Checks{3});
  }
  SECTION("the last check finds that the run diverged") {
    auto trainer = run.trainer(EarlyStopper({.diverged_at = 0.5}), StopsAt{2, StopReason::budget});
    const RunReport report = trainer.fit(run.batches, run.validate(trainer), {.epochs = 3});
    CHECK(report.reason == StopReason::diverged);
    CHECK(report.exit_code() == 1);
  }
}

TEST_CASE("a check and a save that an observer's exception prevented are made up for, once") {
  Run run;
  Saves saves;
  SECTION("on_step") {
    auto trainer = run.trainer(ThrowsOnce{ThrowsOnce::step, 2}, Checkpoints{&saves, 2});
    const auto fit = [&] {
      return trainer.fit(run.batches, run.validate(trainer), {.epochs = 1, .validate_every_steps = 2});
    };
    CHECK_THROWS_WITH(fit(), "observer");
    CHECK(trainer.progress().step == 2);
    CHECK(run.checks.empty());
    fit();
    CHECK(run.checks == Checks{2, 4});
    CHECK(saves == Saves{"0.2", "0.4", "1.0"});
    CHECK(run.optimizer.seen == std::vector<double>{1, 2, 3, 4});
  }
  SECTION("on_skip") {
    auto trainer = run.trainer(Overflows{}, ThrowsOnce{ThrowsOnce::skip, 2}, Checkpoints{&saves, 1});
    CHECK_THROWS_WITH(trainer.fit(run.batches), "observer");
    CHECK(saves == Saves{"0.1"});
    trainer.fit(run.batches);
    CHECK(saves == Saves{"0.1", "0.2", "0.3", "0.4", "1.0"});
  }
  SECTION("on_epoch") {
    auto trainer = run.trainer(ThrowsOnce{ThrowsOnce::epoch, 1}, Checkpoints{&saves});
    CHECK_THROWS_WITH(trainer.fit(run.batches, {.epochs = 2}), "observer");
    CHECK(saves.empty());
    trainer.fit(run.batches, {.epochs = 2});
    CHECK(saves == Saves{"1.0", "2.0"});
  }
  SECTION("on_epoch, at the end of the run") {
    auto trainer = run.trainer(ThrowsOnce{ThrowsOnce::epoch, 1}, Checkpoints{&saves});
    CHECK_THROWS_WITH(trainer.fit(run.batches), "observer");
    CHECK(trainer.fit(run.batches).reason == StopReason::finished);
    CHECK(saves == Saves{"1.0"});
    CHECK(run.optimizer.seen.size() == 4);
  }
  SECTION("validate itself") {
    auto trainer = run.trainer();
    bool throws = true;
    const auto fit = [&] {
      trainer.fit(run.batches,
                  [&] {
                    if (std::exchange(throws, false)) throw std::runtime_error("validation");
                    return run.validate(trainer)();
                  },
                  {.epochs = 1, .validate_every_steps = 3});
    };
    CHECK_THROWS_WITH(fit(), "validation");
    fit();
    CHECK(run.checks == Checks{3, 4});
  }
}

TEST_CASE("what has been checked is not checked again by the next fit()") {
  Run run;
  auto trainer = run.trainer();
  for (const std::int64_t steps : {2, 4})
    trainer.fit(run.batches, run.validate(trainer), {.epochs = 0, .max_steps = steps, .validate_every_steps = 2});
  CHECK(run.checks == Checks{2, 4});
}

TEST_CASE("a last save that failed is tried again, although the run is over") {
  Run run;
  Saves saves;
  auto trainer = run.trainer(Checkpoints{.saves = &saves, .failing = 2});
  for (int i = 0; i < 2; ++i) CHECK_THROWS_WITH(trainer.fit(run.batches), "disk full");
  CHECK(trainer.fit(run.batches).reason == StopReason::finished);
  CHECK(saves == Saves{"1.0", "1.0", "1.0"});
  trainer.fit(run.batches);
  CHECK(saves.size() == 3);
  CHECK(run.optimizer.seen.size() == 4);
}

TEST_CASE("an epoch in which nothing has weight is an error, not a loop without end") {
  Run run;
  auto trainer = run.trainer(GradAccumulator(2));
  run.batches.assign(3, Batch{std::numeric_limits<double>::quiet_NaN(), 0});
  CHECK_THROWS_WITH(trainer.fit(run.batches, {.epochs = 0, .max_steps = 2}),
                    ContainsSubstring("epoch 0 has 3 batches and none with a sample"));
  trainer.restart();
  run.batches.push_back({1, 4});
  CHECK(trainer.fit(run.batches, {.epochs = 0, .max_steps = 2}).progress.epoch == 2);
  SECTION("a window that is carried on counts, and so does a skip") {
    auto carries = run.trainer(GradAccumulator({.steps = 7, .at_epoch_end = AtEpochEnd::carry}));
    CHECK(carries.fit(run.batches, {.epochs = 0, .max_steps = 1}).progress.epoch == 1);
    auto skips = run.trainer(Overflows{});
    CHECK(skips.fit(run.batches, {.epochs = 2}).progress.skipped == 2);
  }
}

namespace {

struct Fragile {
  fakes::Loss loss;
  bool throws;
  void backward() const {
    loss.backward();  // some of the gradients are there already
    if (throws) throw std::runtime_error("backward");
  }
  Fragile operator*(double factor) const { return {loss * factor, throws}; }
  explicit operator double() const { return loss.value; }
};
struct Lbfgs {
  fakes::Model& model;
  void step(auto&& closure) { closure(), model.weight -= model.gradient; }
  void zero_grad() { model.gradient = 0; }
};
struct SecondUpdate {
  static constexpr Role role = Role::observer;
  bool throws;
  int updates = 0;
  void on_phase(Phase phase) {
    if (phase == Phase::update && ++updates == 2 && throws) throw std::runtime_error("observer");
  }
};
constexpr auto fragile = [](fakes::Model& model, const Batch& batch) {
  return Fragile{fakes::mean_loss(model, batch), batch.mean == 100};
};

}  // namespace

TEST_CASE("a window that is dropped leaves neither gradients nor its loss behind") {
  Run run;
  const auto good_bad_good = [&](auto& trainer, std::int64_t window) {
    const auto steps = [&](double mean) {
      for (std::int64_t i = 0; i < window; ++i) trainer.step(Batch{mean, 4});
    };
    steps(1);
    CHECK(trainer.progress().loss == 1);
    CHECK_THROWS(steps(100));
    CHECK(trainer.progress().loss == 1);
    steps(3);
    CHECK(trainer.progress().loss == 3);
    CHECK(run.optimizer.seen == std::vector<double>{1, 3});
  };
  SECTION("backward throws") {
    Trainer trainer{run.model, run.optimizer, fragile};
    good_bad_good(trainer, 1);
  }
  SECTION("backward throws inside of a window") {
    Trainer trainer{run.model, run.optimizer, fragile, GradAccumulator(2)};
    good_bad_good(trainer, 2);
  }
  for (const auto where : {ThrowsOnce::gradients, ThrowsOnce::update}) {
    int windows = 0;
    OnGradients second{[&](fakes::Model&) {
      if (++windows == 2 && where == ThrowsOnce::gradients) throw std::runtime_error("observer");
    }};
    DYNAMIC_SECTION("an update throws, " << int{where}) {
      auto trainer = run.trainer(second, SecondUpdate{where == ThrowsOnce::update});
      good_bad_good(trainer, 1);
    }
    DYNAMIC_SECTION("an update of several micro-batches throws, " << int{where}) {
      auto trainer = run.trainer(GradAccumulator(2), second, SecondUpdate{where == ThrowsOnce::update});
      good_bad_good(trainer, 2);
    }
  }
}

TEST_CASE("with a closure, a step that throws does not count, and one that was made does") {
  Run run;
  Lbfgs optimizer{run.model};
  Trainer trainer{run.model, optimizer, fragile, ThrowsOnce{ThrowsOnce::gradients}};
  CHECK_THROWS_WITH(trainer.step(Batch{100, 4}), "backward");
  CHECK(trainer.progress().samples == 0);
  CHECK(std::isnan(trainer.progress().loss));
  CHECK_THROWS_WITH(trainer.step(Batch{2, 4}), "observer");  // its gradients are seen when the step is made
  CHECK(run.model.weight == -2);
  CHECK(trainer.progress().step == 1);
  CHECK(trainer.progress().loss == 2);
}

namespace {

// A schedule that counts what it hears.
struct Hears {
  static constexpr Role role = Role::schedule;
  int* heard;
  void apply(auto&, std::int64_t) {}
  void observe(double) { ++*heard; }
};

// Can be iterated once, like a DataLoader in use, and does not say how many there are.
struct Once {
  std::vector<Batch>* batches;
  std::vector<Batch>::iterator at;
  struct Iterator {
    Once* from;
    Batch operator*() const { return *from->at; }
    Iterator& operator++() { return ++from->at, *this; }
    bool operator!=(const Iterator&) const { return from->at != from->batches->end(); }
  };
  Iterator begin() { return at = batches->begin(), Iterator{this}; }
  Iterator end() { return {this}; }
};

struct Interruption {
  static constexpr Role role = Role::interruption;
  const bool* flag;
  bool requested() const { return *flag; }
};

}  // namespace

TEST_CASE("the same weights are checked once, also where a run ended at the end of an epoch") {
  Run run;
  int heard = 0;
  SECTION("max_steps is the epoch") {
    run.batches.pop_back();
    double metric = 10;
    auto trainer = run.trainer(EarlyStopper({.patience = 1}), Hears{&heard});
    const auto falling = [&] { return run.validate(trainer)(), --metric; };
    for (const std::int64_t steps : {3, 9})
      CHECK(trainer.fit(run.batches, falling, {.epochs = 10, .max_steps = steps}).reason == StopReason::finished);
    CHECK(run.checks == Checks{3, 6, 9});
    CHECK(heard == 3);
  }
  SECTION("checks by steps, then by epochs") {
    auto trainer = run.trainer();
    trainer.fit(run.batches, run.validate(trainer), {.epochs = 9, .max_steps = 4, .validate_every_steps = 2});
    trainer.fit(run.batches, run.validate(trainer), {.epochs = 2});
    CHECK(run.checks == Checks{2, 4, 8});
  }
  SECTION("an epoch without a step") {
    run.batches.resize(2);
    auto trainer = run.trainer(GradAccumulator({.steps = 4, .at_epoch_end = AtEpochEnd::carry}), Hears{&heard});
    trainer.fit(run.batches, run.validate(trainer), {.epochs = 4});
    CHECK(run.checks == Checks{0, 1, 2});
    CHECK(heard == 3);
  }
}

TEST_CASE("an epoch whose batches are consumed is ended, whichever window the limit fell on") {
  Run run;
  run.batches.pop_back();
  Saves saves;
  int epochs = 0;
  OnEpoch counts{[&](const Progress&) { ++epochs; }};
  for (const std::int64_t window : {1, 2, 3, 4}) {
    INFO(window);
    saves.clear(), run.checks.clear(), epochs = 0;
    auto trainer = run.trainer(GradAccumulator(window), Checkpoints{&saves}, counts);
    const std::int64_t steps = (3 + window - 1) / window;
    for (int i = 0; i < 2; ++i) {
      const auto report = trainer.fit(run.batches, run.validate(trainer), {.epochs = 9, .max_steps = steps});
      CHECK(report.reason == StopReason::finished);
      CHECK(report.progress.epoch == 1);
      CHECK(report.progress.micro_batch == 0);
      CHECK(epochs == 1);
      CHECK(saves == Saves{"1.0"});
      CHECK(run.checks == Checks{steps});
    }
  }
  SECTION("by an observer too; a run that diverged is not checked") {
    for (const auto reason : {StopReason::budget, StopReason::diverged}) {
      run.checks.clear(), epochs = 0;
      auto trainer = run.trainer(StopsAt{3, reason}, counts);
      CHECK(trainer.fit(run.batches, run.validate(trainer), {.epochs = 9}).reason == reason);
      CHECK(trainer.progress().epoch == 1);
      CHECK(epochs == 1);
      CHECK(run.checks == (reason == StopReason::budget ? Checks{3} : Checks{}));
    }
  }
  SECTION("so a range that can be iterated once per epoch goes on") {
    Once once{&run.batches, {}};
    run.optimizer.seen.clear();
    auto trainer = run.trainer();
    for (const std::int64_t steps : {3, 6}) trainer.fit(once, {.epochs = 0, .max_steps = steps});
    CHECK(trainer.progress().epoch == 2);
    CHECK(run.optimizer.seen == std::vector<double>{1, 2, 3, 1, 2, 3});
  }
}

TEST_CASE("the end of an epoch that an interruption or an exception took is made up for by the next fit()") {
  Run run;
  run.batches.pop_back();
  Saves saves;
  bool asked = false, throws = false;
  int epochs = 0;
  OnEpoch counts{[&](const Progress&) { ++epochs; }};
  for (const std::int64_t every : {0, 1, 2})
    for (const std::int64_t window : {1, 2})
      for (const bool interrupts : {true, false}) {
        INFO(every << ' ' << window << ' ' << interrupts);
        saves.clear(), run.checks.clear(), epochs = 0;
        auto trainer = run.trainer(GradAccumulator(window), Checkpoints{&saves}, counts, Interruption{&asked});
        const std::int64_t steps = window == 1 ? 3 : 2;
        auto validate = [&](const Interruption&) {
          if (trainer.progress().step == steps) asked = interrupts, throws = !interrupts;
          if (throws) throw std::runtime_error("validation");
          if (!asked) run.validate(trainer)();
          return 1.0;
        };
        const FitOptions options{.epochs = 9, .max_steps = steps, .validate_every_steps = every};
        if (interrupts) CHECK(trainer.fit(run.batches, validate, options).reason == StopReason::preempted);
        else CHECK_THROWS_WITH(trainer.fit(run.batches, validate, options), "validation");
        asked = throws = false;
        const auto report = trainer.fit(run.batches, [&] { return run.validate(trainer)(); }, options);
        CHECK(report.reason == StopReason::finished);
        CHECK(report.progress.epoch == 1);
        CHECK(report.progress.micro_batch == 0);
        CHECK(epochs == 1);
        CHECK(saves.back() == "1.0");
        CHECK(run.checks.back() == steps);
      }
}

TEST_CASE("a window that a preempted run carried is stepped on when a limit ends the run, and the step is saved") {
  Run run;
  run.batches.resize(6);
  Saves saves;
  bool asked = false;
  auto trainer = run.trainer(GradAccumulator({.steps = 4, .at_epoch_end = AtEpochEnd::carry}), Checkpoints{&saves},
                             Interruption{&asked}, OnEpoch{[&](const Progress&) { asked = true; }});
  CHECK(trainer.fit(run.batches, {.epochs = 3}).reason == StopReason::preempted);
  CHECK(trainer.template get<GradAccumulator>().pending());
  asked = false;
  CHECK(trainer.fit(run.batches, run.validate(trainer), {.epochs = 1}).reason == StopReason::finished);
  CHECK(!trainer.template get<GradAccumulator>().pending());
  CHECK(trainer.progress().step == 2);
  CHECK(run.checks == Checks{2});
  CHECK(saves == Saves{"1.0", "1.0"});
}

TEST_CASE("so is one that nobody would check or save") {
  Run run;
  run.batches.resize(6);
  bool asked = false;
  auto trainer = run.trainer(GradAccumulator({.steps = 4, .at_epoch_end = AtEpochEnd::carry}), Interruption{&asked},
                             OnEpoch{[&](const Progress&) { asked = true; }});
  trainer.fit(run.batches, {.epochs = 3});
  asked = false;
  CHECK(trainer.fit(run.batches, {.epochs = 1}).progress.step == 2);
}

TEST_CASE("the last step, on a window that was carried, is in the last save") {
  Run run;
  Saves saves;
  auto trainer = run.trainer(GradAccumulator({.steps = 3, .at_epoch_end = AtEpochEnd::carry}), Checkpoints{&saves},
                             EarlyStopper({.target = 1.0}));
  trainer.fit(run.batches, run.validate(trainer), {.epochs = 3});
  CHECK(trainer.progress().step == 2);
  CHECK(saves == Saves{"1.0", "1.0"});
}

TEST_CASE("steps by hand count, and an epoch that no fit() entered starts at its first batch") {
  for (const int by_hand : {2, 4, 5}) {
    Run run;
    run.batches.pop_back();
    auto trainer = run.trainer();
    const auto by_hand_and_fit = [&](std::int64_t epochs) {
      run.optimizer.seen.clear();
      for (int i = 0; i < by_hand; ++i) trainer.step(Batch{7, 4});
      const std::int64_t steps = trainer.progress().step;
      const auto report = trainer.fit(run.batches, {.epochs = epochs});
      CHECK(report.progress.step == steps + 3);
      CHECK(report.progress.samples == 4 * report.progress.step);
      CHECK(std::vector<double>(run.optimizer.seen.begin() + by_hand, run.optimizer.seen.end()) ==
            std::vector<double>{1, 2, 3});
    };
    by_hand_and_fit(1);
    by_hand_and_fit(2);
  }
}

namespace {

// A directory that another manager holds.
struct Taken : Checkpoints {
  void claim() { throw std::runtime_error("taken"); }
};

}  // namespace

TEST_CASE("a fit() that trains nothing leaves the model in training mode and the weights as they are") {
  Run run;
  SECTION("over") {
    auto trainer = run.trainer();
    trainer.fit(run.batches);
    run.model.training = false;
    trainer.fit(run.batches);
  }
  SECTION("bad options") {
    run.model.training = false;
    auto trainer = run.trainer();
    CHECK_THROWS(trainer.fit(run.batches, {.epochs = -1}));
  }
  SECTION("no checkpoints can be written") {
    run.model.training = false;
    auto trainer = run.trainer(Taken{});
    CHECK_THROWS_WITH(trainer.fit(run.batches), "taken");
  }
  CHECK(run.model.training);
}

namespace {

struct OnUpdate {
  static constexpr Role role = Role::observer;
  std::function<void()> call;
  void on_phase(Phase phase) const {
    if (phase == Phase::update) call();
  }
};

// Asks for every step once, and for no epoch; notes which saves know the metric of their weights.
struct EveryStep {
  static constexpr Role role = Role::checkpointing;
  std::vector<std::string>* saves;
  std::int64_t last = 0;
  bool due(const Progress& at) const { return at.step > last; }
  void save(const Progress& at, auto&, auto&, auto&...) {
    last = at.step;
    saves->push_back(std::to_string(at.step) + (at.metric_step == at.step ? " measured" : ""));
  }
  std::optional<Progress> restore(auto&, auto&, auto&...) { return std::nullopt; }
  void wait() {}
};

}  // namespace

TEST_CASE("a step that was saved before its check is saved again after it") {
  Run run;
  run.batches.resize(2);
  Saves saves;
  SECTION("in fit()") {
    auto trainer = run.trainer(EveryStep{&saves});
    trainer.fit(run.batches, run.validate(trainer), {.epochs = 2});
    CHECK(saves == Saves{"1", "2", "2 measured", "3", "4", "4 measured"});
  }
  SECTION("a check that comes first needs no second save") {
    auto trainer = run.trainer(EveryStep{&saves});
    trainer.fit(run.batches, run.validate(trainer), {.epochs = 1, .validate_every_steps = 1});
    CHECK(saves == Saves{"1 measured", "2 measured", "2 measured"});  // the last: the epoch is counted
  }
  SECTION("in a loop of one's own") {
    auto trainer = run.trainer(EveryStep{&saves});
    trainer.step(Batch{1, 4});
    trainer.save();
    trainer.check(1.0);
    CHECK(saves == Saves{"1", "1 measured"});
  }
}

TEST_CASE("a save inside an update is refused, and one in on_step is not") {
  Run run;
  Saves saves;
  for (const std::int64_t window : {1, 2})
    for (const auto where : {ThrowsOnce::gradients, ThrowsOnce::update, ThrowsOnce::step}) {
      INFO(window << ' ' << int{where});
      std::function<void()> save;
      const auto saves_at = [&](ThrowsOnce::Where here) {
        if (here == where) save();
      };
      auto trainer = run.trainer(GradAccumulator(window), Checkpoints{&saves},
                                 OnGradients{[&](fakes::Model&) { saves_at(ThrowsOnce::gradients); }},
                                 OnStep{[&](const Progress&) { saves_at(ThrowsOnce::step); }},
                                 OnUpdate{[&] { saves_at(ThrowsOnce::update); }});
      save = [&] { trainer.save(); };
      const auto steps = [&] {
        for (std::int64_t i = 0; i < window; ++i) trainer.step(Batch{1, 4});
      };
      if (where == ThrowsOnce::step) CHECK_NOTHROW(steps());
      else CHECK_THROWS_WITH(steps(), ContainsSubstring("save() inside a backward pass or an update"));
      CHECK_NOTHROW(save());
    }
}
