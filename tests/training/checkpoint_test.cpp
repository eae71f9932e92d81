#include "../support/catch.hpp"
#include "../support/one_thread.hpp"
#include "../support/states.hpp"
#include "../support/temporary_directory.hpp"

#include <frugal/checkpoint_manager.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/schedule.hpp>
#include <frugal/update.hpp>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace frugal;

// A loop that the user owns, cut off at any micro-batch and continued by fresh objects: it ends bit for bit where the loop
// that was left alone does.

namespace {

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

torch::nn::Sequential make_model() {
  using namespace torch::nn;
  return Sequential(Linear(4, 8), BatchNorm1d(8), Dropout(0.4), Linear(8, 2));
}

constexpr std::int64_t epochs = 3, micro_batches = 7, window = 3;

// Goes on from the checkpoint, if there is one, for `budget` micro-batches. True: it came to the end, and `end` is what it
// left.
bool go_on(const std::filesystem::path& folder, const MakeOptimizer& make, std::int64_t budget,
           std::optional<frugal::detail::State>& end) {
  torch::nn::Sequential model = make_model();
  const auto optimizer = make(model->parameters());
  GradAccumulator accumulator(window);
  EarlyStopper stopper({.patience = 100});
  Schedule schedule(warmup(2, linear(7)));
  CheckpointManager checkpoints({.directory = folder});
  Progress at = checkpoints.restore(model, optimizer, accumulator, stopper, schedule).value_or(Progress{});
  schedule.apply(*optimizer, at.step);
  const auto save = [&] { checkpoints.save(at, model, optimizer, accumulator, stopper, schedule); };
  const auto step = [&] {
    update(*optimizer, accumulator);
    schedule.apply(*optimizer, ++at.step);
  };
  for (; at.epoch < epochs; ++at.epoch, at.micro_batch = 0) {
    for (; at.micro_batch < micro_batches; --budget) {
      if (budget == 0) return save(), false;
      const auto inputs =
          torch::full({5, 4}, 0.1 * static_cast<double>(at.micro_batch)) + torch::arange(5).view({5, 1});
      const auto noisy = inputs + torch::randn({5, 4});
      ++at.micro_batch;
      if (accumulator.backward(model->forward(noisy).pow(2).mean(), 5)) step();
    }
    if (accumulator.pending()) step();  // a short last window
    stopper.observe(model[0]->as<torch::nn::Linear>()->weight.sum().item<double>());
  }
  save();
  end = stored(model, optimizer, accumulator, stopper, schedule);
  return true;
}

frugal::detail::State run(const MakeOptimizer& make, std::int64_t budget) {
  const TemporaryDirectory folder;
  std::optional<frugal::detail::State> end;
  for (std::uint64_t process = 0; process < 200; ++process) {
    torch::manual_seed(process == 0 ? 11 : 1000 + process);
    if (go_on(folder.path(), make, budget, end)) return *end;
  }
  throw std::runtime_error("the run never ends");
}

template <class Optimizer, class Options>
MakeOptimizer maker(Options options) {
  return [options](std::vector<at::Tensor> all) {
    std::vector<at::Tensor> weights{all[0], all[4]}, others{all[1], all[2], all[3], all[5]};
    auto optimizer = std::make_unique<Optimizer>(
        std::vector<torch::optim::OptimizerParamGroup>{std::move(weights), std::move(others)}, options);
    static_cast<Options&>(optimizer->param_groups()[1].options()).weight_decay(0);
    return optimizer;
  };
}

}  // namespace

TEST_CASE("cut off at any micro-batch, any number of times, a loop by hand ends as if it had been left alone") {
  using namespace torch::optim;
  const OneThread one_thread;
  const std::vector<MakeOptimizer> optimizers{
      maker<AdamW>(AdamWOptions(0.01).amsgrad(true)),
      maker<Adam>(AdamOptions(0.01).weight_decay(0.1)),
      maker<SGD>(SGDOptions(0.01).momentum(0.9).nesterov(true)),
      maker<Adagrad>(AdagradOptions(0.05).lr_decay(0.01)),
      maker<RMSprop>(RMSpropOptions(0.01).momentum(0.5).centered(true)),
  };
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    const frugal::detail::State whole = run(optimizers[i], -1);
    for (const std::int64_t budget : {1, 2, 4, 7, 11}) {
      INFO("optimizer " << i << ", cut off after every " << budget << " micro-batches");
      CHECK(difference(run(optimizers[i], budget), whole) == "");
    }
  }
}

// Needs python3 with the packages safetensors and numpy.
TEST_CASE("other tools open a checkpoint and find the documented names") {
  if (std::system("python3 -c 'import safetensors.numpy' 2> /dev/null") != 0) {
    WARN("skipped: python3 cannot import safetensors and numpy");
    return;
  }
  const TemporaryDirectory folder;
  torch::nn::Linear model(3, 2);
  torch::optim::Adam optimizer(model->parameters());
  EarlyStopper stopper;
  stopper.observe(0.5);
  GradAccumulator accumulator(2);
  const auto loss = [&] { return model(torch::ones({1, 3})).sum(); };
  loss().backward();
  optimizer.step();
  optimizer.zero_grad();
  CHECK_FALSE(accumulator.backward(loss()));
  CheckpointManager checkpoints({.directory = folder.path()});
  checkpoints.save({.epoch = 4, .step = 1}, model, optimizer, stopper, accumulator);
  checkpoints.wait();
  write_text(folder / "check.py", R"(
import sys
from safetensors import safe_open
from safetensors.numpy import load_file
tensors = load_file(sys.argv[1])
expected = {"model/weight", "model/bias", "gradient/model/weight", "gradient/model/bias", "rng/random.cpu"}
expected |= {f"optimizer/model/{p}/{s}" for p in ("weight", "bias") for s in ("exp_avg", "exp_avg_sq")}
assert set(tensors) == expected, set(tensors) ^ expected
assert tensors["model/weight"].shape == (2, 3) and tensors["gradient/model/bias"].tolist() == [0.5, 0.5]
with safe_open(sys.argv[1], "np") as f:
    m = f.metadata()
assert m["progress.epoch"] == "4" and m["optimizer/class"] == "string:Adam" and m["optimizer/group.0/lr"] == "double:0.001"
assert m["state/stopping/best"] == "double:0.5" and m["optimizer/model/bias/step"] == "int:1"
assert m["frugal.version"] and m["libtorch.version"]
)");
  const std::string command =
      "python3 '" + (folder / "check.py").string() + "' '" + checkpoints.list().at(0).path.string() + "'";
  CHECK(std::system(command.c_str()) == 0);
}
