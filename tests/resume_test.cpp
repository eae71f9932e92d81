#include "support/catch.hpp"
#include "support/fakes.hpp"

#include <frugal/early_stopper.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/trainer.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

using namespace frugal;
using fakes::Batch;

// Runs that are cut off and continued, without tensors: the loop's own part of an exact resume.

namespace {

std::mt19937 generator;  // the default generator of this small world

struct RandomState {
  std::string state;
  static RandomState now() {
    std::ostringstream out;
    out << generator;
    return {out.str()};
  }
  void restore() const {
    if (!state.empty()) std::istringstream(state) >> generator;
  }
  void save(auto& out) const { out.write("random", state); }
  void load(auto& in) { in.read("random", state); }
};

// What a save found, by section; shared by all attempts.
struct Disk {
  std::map<std::string, fakes::Archive> sections;
  Progress at;
  double weight, gradient;
  RandomState random;
};

struct Checkpoints {
  static constexpr Role role = Role::checkpointing;
  using RandomState = ::RandomState;
  std::shared_ptr<std::optional<Disk>> disk;

  template <class Stateful>
  static std::string section() {
    if constexpr (requires { Stateful::state_name; }) return std::string(Stateful::state_name);
    else return std::to_string(static_cast<int>(Stateful::role));
  }
  bool due(const Progress&) const { return false; }
  template <class... Stateful>
  void save(const Progress& at, fakes::Model& model, fakes::Optimizer&, Stateful&... stateful) {
    *disk = Disk{{}, at, model.weight, model.gradient, RandomState::now()};
    (stateful.save((*disk)->sections[section<Stateful>()]), ...);
  }
  template <class... Stateful>
  std::optional<Progress> restore(fakes::Model& model, fakes::Optimizer&, Stateful&... stateful) {
    if (!*disk) return std::nullopt;
    model.weight = (*disk)->weight, model.gradient = (*disk)->gradient;
    (stateful.load((*disk)->sections.at(section<Stateful>())), ...);
    (*disk)->random.restore();
    return (*disk)->at;
  }
  void wait() {}
};

struct Interruption {
  static constexpr Role role = Role::interruption;
  const bool* asked;
  bool requested() const { return *asked; }
};

// Three effective batches of 12 samples with the means 1, 2, 3, each cut into `parts` micro-batches.
struct Cut {
  std::int64_t parts;
  std::string name = "three batches";
  std::vector<Batch> epoch(std::int64_t, std::int64_t consumed) const {
    std::vector<Batch> rest;
    for (std::int64_t i = consumed; i < size(); ++i) rest.push_back({1.0 + static_cast<double>(i / parts), 12 / parts});
    return rest;
  }
  std::int64_t size() const { return 3 * parts; }
  std::int64_t steps() const { return parts; }
  std::string fingerprint() const { return name; }
};

// A range that draws random numbers when it begins and for every batch, as a DataLoader may.
struct Drawn {
  struct Iterator {
    int left;
    double offset;
    Batch operator*() const { return {offset + static_cast<double>(generator() % 1000), 2}; }
    Iterator& operator++() { return --left, *this; }
    bool operator!=(const Iterator& other) const { return left != other.left; }
  };
  Iterator begin() { return {7, static_cast<double>(generator() % 100)}; }
  Iterator end() { return {0, 0}; }
};

struct Outcome {
  double weight, best;
  std::int64_t samples, steps, epochs;
  bool operator==(const Outcome&) const = default;
};

// Trains 4 epochs, interrupted after every `every` micro-batches (0: never) and continued by new objects each time.
// `batches(attempt)` gives the data, `window(attempt)` the length of the windows.
Outcome train(auto batches, auto window, int every) {
  generator.seed(7);
  const auto disk = std::make_shared<std::optional<Disk>>();
  for (int attempt = 0; attempt < 1000; ++attempt) {
    if (attempt > 0) generator.seed(100u + static_cast<unsigned>(attempt));  // another process
    fakes::Model model;
    fakes::Optimizer optimizer{model};
    int left = every;
    bool asked = false;
    auto loss = [&](fakes::Model& net, const Batch& batch) {
      asked = --left == 0;
      return fakes::Loss{batch.mean * (1 + static_cast<double>(generator() % 10)), &net};  // "dropout"
    };
    auto validate = [&] { return model.weight + static_cast<double>(generator() % 100); };
    Trainer trainer{model,
                    optimizer,
                    loss,
                    GradAccumulator(window(attempt)),
                    Checkpoints{disk},
                    Interruption{&asked},
                    EarlyStopper({.patience = 100})};
    CHECK(trainer.resume() == (attempt > 0));
    if (attempt > 0) generator();  // whoever draws here leaves no trace
    auto data = batches(attempt);
    const RunReport report = trainer.fit(data, validate, {.epochs = 4});
    if (report.reason != StopReason::preempted)
      return {model.weight, report.best_metric, report.progress.samples, report.progress.step, report.progress.epoch};
  }
  throw std::runtime_error("the run never ends");
}

constexpr auto windows_of(std::int64_t length) {
  return [length](int) { return length; };
}

}  // namespace

TEST_CASE("killed at any micro-batch and resumed, a run ends where an uninterrupted one does") {
  const auto positioned = [](int) { return Cut{4}; };
  const auto drawn = [](int) { return Drawn{}; };
  for (const std::int64_t window : {1, 3, 4, 5}) {
    const Outcome whole = train(positioned, windows_of(window), 0), whole_drawn = train(drawn, windows_of(window), 0);
    CHECK(whole.epochs == 4);
    for (const int every : {1, 2, 3, 5, 7, 11, 12, 13}) {
      CHECK(train(positioned, windows_of(window), every) == whole);
      CHECK(train(drawn, windows_of(window), every) == whole_drawn);
    }
  }
}

TEST_CASE("with other micro-batches the unfinished window starts again at its first sample") {
  // Without "dropout" the cut does not matter: every window's mean is the same.
  const auto sizes = [](int attempt) { return attempt % 2 == 0 ? Cut{4} : Cut{3}; };
  const auto disk = std::make_shared<std::optional<Disk>>();
  std::vector<double> stepped;
  for (int attempt = 0; attempt < 50; ++attempt) {
    fakes::Model model;
    fakes::Optimizer optimizer{model};
    int left = 6;
    bool asked = false;
    auto loss = [&](fakes::Model& net, const Batch& batch) {
      asked = --left == 0;
      return fakes::mean_loss(net, batch);
    };
    const Cut batches = sizes(attempt);
    Trainer trainer{model, optimizer, loss, GradAccumulator(batches.steps()), Checkpoints{disk}, Interruption{&asked}};
    trainer.resume();
    const RunReport report = trainer.fit(batches, {.epochs = 2});
    stepped.insert(stepped.end(), optimizer.seen.begin(), optimizer.seen.end());
    if (report.reason == StopReason::preempted) continue;
    CHECK(report.progress.samples == 72);
    CHECK(report.progress.step == 6);
    CHECK(model.weight == -12);
    break;
  }
  CHECK(stepped == std::vector<double>{1, 2, 3, 1, 2, 3});
}

TEST_CASE("a position in other data, or in a window that cannot go on, is an error") {
  fakes::Model model;
  fakes::Optimizer optimizer{model};
  const auto disk = std::make_shared<std::optional<Disk>>();
  bool asked = true;
  Trainer first{model, optimizer, fakes::mean_loss, GradAccumulator(3), Checkpoints{disk}, Interruption{&asked}};
  asked = false;
  first.step(Batch{1, 4});
  first.save();

  auto continued = [&](auto batches, std::int64_t steps) {
    Trainer trainer{model, optimizer, fakes::mean_loss, GradAccumulator(steps), Checkpoints{disk}};
    trainer.resume();
    trainer.fit(batches, {.epochs = 1});
  };
  (*disk)->at.epoch = 0;
  CHECK_THROWS_WITH(continued(std::vector<Batch>(4), 2), ContainsSubstring("inside a window of 3"));
  Trainer without{model, optimizer, fakes::mean_loss, Checkpoints{disk}};
  without.resume();
  CHECK_THROWS_WITH(without.fit(std::vector<Batch>(4)), ContainsSubstring("cannot continue"));
  std::vector<Batch> none;
  CHECK_THROWS_WITH(continued(none, 3), ContainsSubstring("end before the position"));

  Trainer positioned{model, optimizer, fakes::mean_loss, GradAccumulator(4), Checkpoints{disk}, Interruption{&asked}};
  asked = true;
  positioned.fit(Cut{4}, {.epochs = 1});  // asked before it began: nothing happened
  asked = false;
  int left = 2;
  auto stops = [&](fakes::Model& net, const Batch& batch) { return asked = --left == 0, fakes::mean_loss(net, batch); };
  Trainer stopping{model, optimizer, stops, GradAccumulator(4), Checkpoints{disk}, Interruption{&asked}};
  CHECK(stopping.fit(Cut{4}).reason == StopReason::preempted);
  CHECK_THROWS_WITH(continued(Cut{4, "other batches"}, 4), ContainsSubstring("other batches"));
}

TEST_CASE("another cut of the last batch alone is another cut") {
  struct Short {  // 16 samples in batches of 10: the last one has 6
    std::int64_t micro_batch;
    std::vector<Batch> epoch(std::int64_t, std::int64_t consumed) const {
      std::vector<Batch> all{{1, 5}, {1, 5}};
      if (micro_batch == 5) all.insert(all.end(), {{2, 3}, {2, 3}});
      else all.push_back({2, 6});
      return {all.begin() + consumed, all.end()};
    }
    std::int64_t size() const { return micro_batch == 5 ? 4 : 3; }
    std::int64_t steps() const { return 2; }
    std::string fingerprint() const { return "sixteen"; }
  };
  const auto disk = std::make_shared<std::optional<Disk>>();
  RunReport report;
  for (const std::int64_t micro_batch : {5, 6}) {
    fakes::Model model;
    fakes::Optimizer optimizer{model};
    int left = 3;
    bool asked = false;
    auto loss = [&](fakes::Model& net, const Batch& batch) {
      return asked = --left == 0, fakes::mean_loss(net, batch);
    };
    Trainer trainer{model, optimizer, loss, GradAccumulator(2), Checkpoints{disk}, Interruption{&asked}};
    trainer.resume();
    report = trainer.fit(Short{micro_batch});
  }
  CHECK(report.progress.samples == 16);
  CHECK(report.progress.step == 2);
}

namespace {

// Trains in two calls of fit(), the first of which ends early, and returns the gradients of all steps.
std::vector<double> in_two_calls(auto& one, auto& other, FitOptions first, auto... policies) {
  fakes::Model model;
  fakes::Optimizer optimizer{model};
  Trainer trainer{model, optimizer, fakes::mean_loss, policies...};
  trainer.fit(one, first);
  trainer.fit(other, {.epochs = 2});
  return optimizer.seen;
}

}  // namespace

TEST_CASE("without checkpoints a later fit goes on where the one before stopped, or says why it cannot") {
  std::vector<Batch> list{{1}, {2}, {3}, {4}}, shorter{{1}, {2}, {3}};
  Cut cut{2}, finer{4}, others{2, "other batches"};
  const std::vector<double> all{1, 2, 3, 4, 1, 2, 3, 4}, of_cut{1, 1, 2, 2, 3, 3, 1, 1, 2, 2, 3, 3};
  const auto after = [](std::int64_t steps) { return FitOptions{.epochs = 2, .max_steps = steps}; };
  for (const std::int64_t first : {1, 3, 4, 5}) {
    CHECK(in_two_calls(list, list, after(first)) == all);
    CHECK(in_two_calls(cut, cut, after(first)) == of_cut);
  }
  CHECK_THROWS_WITH(in_two_calls(cut, others, after(3)), ContainsSubstring("inside an epoch of other batches"));
  CHECK_THROWS_WITH(in_two_calls(cut, finer, after(3)), ContainsSubstring("inside an epoch of other batches"));
  CHECK_THROWS_WITH(in_two_calls(list, shorter, after(2)), ContainsSubstring("inside an epoch of other batches"));
  CHECK(in_two_calls(list, shorter, {.epochs = 1}).size() == 7);  // between epochs they may change

  Drawn drawn;  // in another order each time
  CHECK_THROWS_WITH(in_two_calls(drawn, drawn, after(3)), ContainsSubstring("Pass a CheckpointManager"));
  CHECK(in_two_calls(drawn, drawn, {.epochs = 1}).size() == 14);
  generator.seed(5);
  const auto disk = std::make_shared<std::optional<Disk>>();
  const std::vector<double> replayed = in_two_calls(drawn, drawn, after(3), Checkpoints{disk});
  generator.seed(5);
  CHECK(replayed == in_two_calls(drawn, drawn, {.epochs = 1}));
}

TEST_CASE("looking whether an epoch has another batch leaves no trace in the random numbers") {
  struct Fetching {  // draws in ++, as a DataLoader does that fetches its next batch there
    struct Iterator {
      int left;
      double mean;
      Batch operator*() const { return {mean, 2}; }
      Iterator& operator++() { return --left, mean = static_cast<double>(generator() % 1000), *this; }
      bool operator!=(const Iterator& other) const { return left != other.left; }
    };
    Iterator begin() { return {5, static_cast<double>(generator() % 1000)}; }
    Iterator end() { return {0, 0}; }
  };
  const auto trained = [](std::int64_t steps) {
    generator.seed(5);
    Fetching batches;
    const auto disk = std::make_shared<std::optional<Disk>>();
    return in_two_calls(batches, batches, {.epochs = 2, .max_steps = steps}, Checkpoints{disk});
  };
  for (const std::int64_t steps : {1, 3, 5, 6}) CHECK(trained(steps) == trained(10));
}

TEST_CASE("with checkpoints a container of another size inside an epoch is an error too") {
  std::vector<Batch> list{{1}, {2}, {3}, {4}}, longer(5);
  const auto disk = std::make_shared<std::optional<Disk>>();
  CHECK_THROWS_WITH(in_two_calls(list, longer, {.epochs = 2, .max_steps = 2}, Checkpoints{disk}),
                    ContainsSubstring("epoch of 4 batches; now there are 5"));
}

TEST_CASE("a position in one kind of batches is none in another kind") {
  struct Unnamed {  // has positions, but does not say of what
    std::vector<Batch> epoch(std::int64_t, std::int64_t consumed) const { return Cut{4}.epoch(0, consumed); }
  };
  std::vector<Batch> list(12);  // as many as the others have
  Cut cut{4};
  Drawn drawn;
  Unnamed unnamed;
  const FitOptions first{.epochs = 2, .max_steps = 2};
  const auto refused = [&](auto& one, auto& other, const std::string& why, auto... policies) {
    CHECK_THROWS_WITH(in_two_calls(one, other, first, policies...), ContainsSubstring(why));
  };
  const auto disk = std::make_shared<std::optional<Disk>>();
  refused(list, cut, "inside an epoch of a container; now it gets Batches", Checkpoints{disk});
  refused(cut, list, "inside an epoch of Batches; now it gets a container", Checkpoints{disk});
  refused(drawn, list, "inside an epoch of a range that does not know its size; now it gets a container",
          Checkpoints{disk});
  refused(list, drawn, "now it gets a range", Checkpoints{disk});
  refused(cut, unnamed, "now it gets a source with epoch", Checkpoints{disk});
  refused(unnamed, drawn, "inside an epoch of a source with epoch", Checkpoints{disk});
  refused(list, cut, "inside an epoch of other batches");
  refused(unnamed, list, "inside an epoch of other batches");

  fakes::Model model;
  fakes::Optimizer optimizer{model};
  const auto resumed = [&](auto batches) {
    Trainer trainer{model, optimizer, fakes::mean_loss, Checkpoints{disk}};
    trainer.resume();
    return trainer.fit(batches, {.epochs = 1}).progress.samples;
  };
  {
    Trainer trainer{model, optimizer, fakes::mean_loss, Checkpoints{disk}};
    trainer.fit(list, first);
  }
  CHECK_THROWS_WITH(resumed(cut), ContainsSubstring("inside an epoch of a container; now it gets Batches"));
  for (auto& [name, section] : (*disk)->sections) section.write("kind", std::string());  // as an earlier version
  CHECK_NOTHROW(resumed(cut));
}

TEST_CASE("a validation that was cut short is repeated with the same random numbers") {
  const auto run = [](bool interrupt, FitOptions options) {
    generator.seed(3);
    const auto disk = std::make_shared<std::optional<Disk>>();
    std::vector<double> metrics;
    for (int attempt = 0; attempt < 10; ++attempt) {
      fakes::Model model;
      fakes::Optimizer optimizer{model};
      bool asked = false;
      auto validate = [&](const Interruption&) {
        const double drawn = static_cast<double>(generator() % 1000);
        if (interrupt && attempt == 0) asked = true;
        else metrics.push_back(drawn);
        return drawn;
      };
      Trainer trainer{model, optimizer, fakes::mean_loss, Checkpoints{disk}, Interruption{&asked}};
      trainer.resume();
      if (trainer.fit(Cut{2}, validate, options).reason == StopReason::finished) return metrics;
    }
    return metrics;
  };
  for (const FitOptions options :
       {FitOptions{.epochs = 2}, FitOptions{.epochs = 2, .validate_every_steps = 4},
        FitOptions{.epochs = 0, .max_steps = 4}, FitOptions{.epochs = 1, .validate_every_steps = 7}}) {
    const auto whole = run(false, options);
    CHECK(!whole.empty());
    CHECK(run(true, options) == whole);
  }
}

TEST_CASE("a check that comes after a save in on_step is made when the run goes on from there") {
  const auto disk = std::make_shared<std::optional<Disk>>();
  std::vector<std::int64_t> checks;
  const auto go_on = [&](bool dies) {
    fakes::Model model;
    fakes::Optimizer optimizer{model};
    std::function<void(const Progress&)> hook;
    Trainer trainer{model, optimizer, fakes::mean_loss, Checkpoints{disk},
                    OnStep{[&](const Progress& at) { hook(at); }}};
    hook = [&](const Progress& at) {
      if (dies && at.step == 4) trainer.save(), throw std::runtime_error("killed");
    };
    trainer.resume();
    auto validate = [&] { return checks.push_back(trainer.progress().step), 1.0; };
    trainer.fit(Cut{2}, validate, {.epochs = 1, .validate_every_steps = 2});
  };
  CHECK_THROWS_WITH(go_on(true), "killed");
  go_on(false);
  CHECK(checks == std::vector<std::int64_t>{2, 4, 6});
}

TEST_CASE("a run that was killed after the save of its last step has its epoch ended when it goes on") {
  const auto disk = std::make_shared<std::optional<Disk>>();
  const auto last_of = [&](auto batches, std::int64_t steps, bool dies) {
    fakes::Model model;
    fakes::Optimizer optimizer{model};
    std::function<void(const Progress&)> hook;
    Trainer trainer{model, optimizer, fakes::mean_loss, Checkpoints{disk},
                    OnStep{[&](const Progress& at) { hook(at); }}};
    hook = [&](const Progress& at) {
      if (dies && at.step == steps) trainer.save(), throw std::runtime_error("killed");
    };
    trainer.resume();
    return trainer.fit(batches, {.epochs = 9, .max_steps = steps}).progress.epoch;
  };
  CHECK_THROWS_WITH(last_of(Cut{2}, 6, true), "killed");
  CHECK(last_of(Cut{2}, 6, false) == 1);
  CHECK(last_of(Cut{2}, 6, false) == 1);
  disk->reset();
  CHECK_THROWS_WITH(last_of(std::vector<Batch>(3), 3, true), "killed");
  CHECK(last_of(std::vector<Batch>(3), 3, false) == 1);
}

TEST_CASE("the end of an epoch, cut short with the last step that is allowed, is made up for after a resume") {
  for (const std::int64_t window : {1, 2}) {
    const auto disk = std::make_shared<std::optional<Disk>>();
    std::vector<Batch> list{{1}, {2}, {3}};
    int epochs = 0, checks = 0;
    RunReport report;
    for (int attempt = 0; attempt < 3; ++attempt) {  // the last one finds a run that is over
      fakes::Model model;
      fakes::Optimizer optimizer{model};
      bool asked = false;
      auto validate = [&](const Interruption&) { return attempt == 0 ? asked = true : ++checks, 1.0; };
      Trainer trainer{model,
                      optimizer,
                      fakes::mean_loss,
                      GradAccumulator(window),
                      Checkpoints{disk},
                      Interruption{&asked},
                      OnEpoch{[&](const Progress&) { ++epochs; }}};
      trainer.resume();
      report = trainer.fit(list, validate, {.epochs = 9, .max_steps = window == 1 ? 3 : 2});
      CHECK(optimizer.seen.size() == (attempt > 0 ? 0u : window == 1 ? 3u : 2u));
    }
    CHECK(report.reason == StopReason::finished);
    CHECK(report.progress.epoch == 1);
    CHECK(report.progress.micro_batch == 0);
    CHECK(epochs == 1);
    CHECK(checks == 1);
  }
}

TEST_CASE("a run that is begun anew after a resume has the random numbers that it is given") {
  const auto disk = std::make_shared<std::optional<Disk>>();
  fakes::Model model;
  fakes::Optimizer optimizer{model};
  generator.seed(1);
  Trainer trainer{model, optimizer, fakes::mean_loss, Checkpoints{disk}};
  trainer.save();
  CHECK(trainer.resume());
  trainer.restart();
  generator.seed(2);
  const std::string given = RandomState::now().state;
  trainer.step(Batch{1, 4});
  CHECK(RandomState::now().state == given);
}
