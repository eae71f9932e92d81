// Which weights CheckpointManager::restore_best() brings back: those that the metric was measured on.
#include "../support/catch.hpp"
#include "../support/temporary_directory.hpp"
#include "training/network.hpp"

#include <frugal/averager.hpp>
#include <frugal/checkpoint_manager.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/trainer.hpp>

#include <cstdint>
#include <vector>

using namespace frugal;
using namespace network;

namespace {

struct Run {
  NormedNet model = make<NormedNet>();
  torch::optim::AdamW optimizer = adamw(model->parameters());
  std::vector<Batch> batches = cut(data(29), {8, 8, 8, 5});
  std::vector<double> metrics{3, 1, 2, 4};
  std::vector<State> seen = {};

  double operator()() {
    seen.push_back(state_of(*model));
    return metrics.at(seen.size() - 1);
  }
  State best(const TemporaryDirectory& folder) const {
    NormedNet fresh = make<NormedNet>();
    REQUIRE(CheckpointManager({.directory = folder.path()}).restore_best(fresh));
    return state_of(*fresh);
  }
};

// Asks to stop after some micro-batches, inside a window.
struct Asks {
  static constexpr Role role = Role::interruption;
  const bool* asked;
  bool requested() const { return *asked; }
};
// A check at step 1, and then one micro-batch more before the only save.
void interrupted_after_the_check(auto& model, auto& optimizer, Run& run, const TemporaryDirectory& folder) {
  bool asked = false;
  int left = 3;
  const auto loss = [&](auto& net, const Batch& batch) {
    asked = --left == 0;
    return MeanLoss()(net, batch);
  };
  Trainer trainer{model,        optimizer,
                  loss,         GradAccumulator(2),
                  Asks{&asked}, CheckpointManager({.directory = folder.path(), .every_epochs = 0})};
  const auto validate = [&] {
    run.seen.push_back(state_of(*model));
    return 1.0;
  };
  const RunReport report = trainer.fit(run.batches, validate, {.epochs = 2, .validate_every_steps = 1});
  REQUIRE(report.progress.micro_batch == 3);
  REQUIRE(report.progress.metric_step == report.progress.step);
}

const AveragerOptions slow{.decay = 0.9, .ramp = DecayRamp::none};

}  // namespace

TEST_CASE("restore_best: the averages that were validated, with the buffers of that moment") {
  const TemporaryDirectory folder;
  Run run;
  const auto validate = [&] { return run(); };
  {
    Trainer trainer{run.model, run.optimizer, MeanLoss{}, Averager(slow),
                    CheckpointManager({.directory = folder.path(), .keep_last = 1})};
    trainer.fit(run.batches, validate, {.epochs = 3});
  }
  REQUIRE(run.seen.size() == 3);
  CHECK(same_bits(run.best(folder), run.seen[1]));

  Run next;  // saved again by a process that only restored: whose metric it is, is in the file
  {
    Trainer trainer{next.model, next.optimizer, MeanLoss{}, Averager(slow),
                    CheckpointManager({.directory = folder.path(), .keep_last = 1, .keep_best = 0})};
    REQUIRE(trainer.resume());
    trainer.save();
  }
  CHECK(same_bits(next.best(folder), run.seen[2]));
}

TEST_CASE("restore_best: the weights of the model where the averages were not what was validated") {
  const TemporaryDirectory folder;
  Run run;
  Averager average(slow);
  CheckpointManager checkpoints({.directory = folder.path()});
  Progress at{.step = 1, .metric = 2, .metric_step = 1};
  average.update(run.model);
  average.swap(run.model), average.swap(run.model);  // at an earlier step
  train_by_hand(run.model, run.optimizer, run.batches, 1);
  average.update(run.model);
  const State weights = state_of(*run.model);
  checkpoints.save(at, run.model, run.optimizer, average);
  checkpoints.wait();
  CHECK(same_bits(run.best(folder), weights));

  average.swap(run.model);
  const State averages = state_of(*run.model);
  CHECK_FALSE(same_bits(averages, weights));
  average.swap(run.model);
  at.metric = 1;
  checkpoints.save(at, run.model, run.optimizer, average);
  checkpoints.wait();
  CHECK(same_bits(run.best(folder), averages));

  NormedNet other = make<NormedNet>();  // averages of another model are not this one's
  torch::optim::AdamW optimizer = adamw(other->parameters());
  const State others = state_of(*other);
  at.metric = 0;
  checkpoints.save(at, other, optimizer, run.model, average);
  checkpoints.wait();
  CHECK(same_bits(run.best(folder), others));
}

TEST_CASE("restore_best: both names of a tied weight get its average, and bfloat16 weights the rounded one") {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      b = register_parameter("b", torch::ones({2}, torch::kBFloat16));
      register_parameter("a", b);
      register_parameter("c", b);
    }
    at::Tensor b;
  };
  const TemporaryDirectory folder;
  const auto model = std::make_shared<TiedImpl>(), other = std::make_shared<TiedImpl>();
  torch::optim::SGD optimizer({model->b}, 0.1);
  Averager average(slow);
  average.update(model);
  model->b.detach().fill_(3);
  average.update(model);
  average.swap(model);
  const at::Tensor validated = model->b.detach().clone();
  average.swap(model);
  CheckpointManager checkpoints({.directory = folder.path()});
  checkpoints.save({.step = 1, .metric = 1, .metric_step = 1}, model, optimizer, average);
  REQUIRE(checkpoints.restore_best(other));
  CHECK(other->b.equal(validated));
  CHECK_FALSE(other->b.eq(3).any().item<bool>());
}

TEST_CASE("restore_best: the last weights, where the model held the best ones when it was saved") {
  for (const bool averages : {false, true}) {
    const TemporaryDirectory folder;
    Run run;
    run.metrics = {1, 3};
    const auto validate = [&] { return run(); };
    const auto train = [&](auto... policies) {
      Trainer trainer{run.model,
                      run.optimizer,
                      MeanLoss{},
                      EarlyStopper({.patience = 9}),
                      CheckpointManager({.directory = folder.path(), .keep_last = 1, .keep_best = 0}),
                      policies...};
      trainer.fit(run.batches, validate, {.epochs = 2});
      CHECK(same_bits(state_of(*run.model), run.seen[0]));
      trainer.save();
    };
    if (averages) train(Averager(slow));
    else train();
    CHECK(same_bits(run.best(folder), run.seen[1]));
  }
}

TEST_CASE("restore_best: no metric belongs to buffers that a forward pass moved since the check") {
  const TemporaryDirectory folder;
  Run run;
  interrupted_after_the_check(run.model, run.optimizer, run, folder);
  const State moved = state_of(*run.model);
  CHECK_FALSE(same_bits(moved, run.seen.back()));
  const auto best = [&] { return CheckpointManager({.directory = folder.path()}).restore_best(run.model); };
  CHECK_FALSE(best());
  CHECK(same_bits(state_of(*run.model), moved));

  bool asked = false;
  const auto validate = [&] {
    run.seen.push_back(state_of(*run.model));
    return 2.0;
  };
  Trainer next{run.model,          run.optimizer, MeanLoss{},
               GradAccumulator(2), Asks{&asked},  CheckpointManager({.directory = folder.path(), .every_epochs = 0})};
  REQUIRE(next.resume());
  next.save();  // by a process that ran no forward pass itself
  CHECK_FALSE(best());
  REQUIRE(next.resume());
  next.fit(run.batches, validate, {.epochs = 1});
  CHECK(best());
  CHECK(same_bits(state_of(*run.model), run.seen.back()));
}

TEST_CASE("restore_best: without buffers the weights are still those of the check") {
  const TemporaryDirectory folder;
  Run run;
  Net model = make();
  auto optimizer = adamw(model->parameters());
  interrupted_after_the_check(model, optimizer, run, folder);
  Net fresh = make();
  REQUIRE(CheckpointManager({.directory = folder.path()}).restore_best(fresh));
  CHECK(same_bits(state_of(*fresh), run.seen.back()));
}
