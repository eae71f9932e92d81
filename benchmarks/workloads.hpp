#pragma once

#include "json.hpp"
#include "models.hpp"

#include <frugal/batches.hpp>

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// What is trained: a network, a few batches of made-up data that are used in turn, and the work of one step. The same name
// gives the same weights and data in every process; peers get them as files.
namespace bench {

constexpr double learning_rate = 1e-3, weight_decay = 0.01;
constexpr std::int64_t batches_in_turn = 4;

struct Workload {
  std::string name;
  Json model;  // what peers.py builds it from
  std::shared_ptr<Network> network;
  torch::Tensor inputs, targets;  // [batches_in_turn, batch, ...]
  double flops = 0;               // of one step: multiplications and additions of forward and backward

  std::int64_t batch() const { return inputs.size(1); }
  frugal::Batch at(std::int64_t step) const {
    const std::int64_t i = step % inputs.size(0);
    return {inputs[i], targets[i]};
  }
};

inline torch::Tensor loss_of(Network& network, const frugal::Batch& batch) {
  const auto outputs = network.forward(batch.inputs);
  if (batch.targets.is_floating_point()) return torch::mse_loss(outputs, batch.targets);
  return torch::cross_entropy_loss(outputs.flatten(0, -2), batch.targets.flatten());
}

// Multiply-adds of a layer cost 2 in forward and 4 in backward (towards the inputs and towards the weights).
constexpr double flops_per_multiply = 6;

inline Workload mlp(std::string name, const std::vector<std::int64_t>& sizes, std::int64_t batch) {
  Workload made{std::move(name), Json{{"kind", "mlp"}, {"sizes", sizes}}, std::make_shared<Mlp>(sizes), {}, {}};
  made.inputs = torch::randn({batches_in_turn, batch, sizes.front()});
  made.targets = torch::randint(sizes.back(), {batches_in_turn, batch}, torch::kLong);
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i)
    made.flops += flops_per_multiply * static_cast<double>(batch * sizes[i] * sizes[i + 1]);
  return made;
}

inline Workload one_weight() {
  Workload made{"W0", Json{{"kind", "one weight"}}, std::make_shared<OneWeight>(), {}, {}};
  made.inputs = torch::ones({batches_in_turn, 1});
  made.targets = torch::zeros({batches_in_turn, 1});
  return made;
}

// Multiply-adds per image of every convolution and of the head.
inline double multiplies_of(const ResNetOptions& options, std::int64_t side) {
  double multiplies = 0;
  const auto convolution = [&](std::int64_t in, std::int64_t out, std::int64_t size) {
    multiplies += static_cast<double>(in * out * size * size * side * side);
  };
  if (options.stem != 3) side /= 2;
  convolution(3, 64, options.stem);
  if (options.stem != 3) side /= 2;
  std::int64_t in = 64;
  for (std::size_t stage = 0; stage < options.blocks.size(); ++stage) {
    const std::int64_t width = 64 << stage, out = options.bottleneck ? 4 * width : width;
    for (std::int64_t i = 0; i < options.blocks[stage]; ++i) {
      const bool halves = stage > 0 && i == 0;
      if (options.bottleneck) convolution(in, width, 1);
      if (halves) side /= 2;
      if (options.bottleneck) convolution(width, width, 3), convolution(width, out, 1);
      else convolution(in, width, 3), convolution(width, width, 3);
      if (halves || in != out) convolution(in, out, 1);
      in = out;
    }
  }
  return multiplies + static_cast<double>(in * options.classes);
}

inline Workload resnet(std::string name, const ResNetOptions& options, std::int64_t batch, std::int64_t side) {
  Workload made{std::move(name),
                Json{{"kind", "resnet"},
                     {"blocks", options.blocks},
                     {"bottleneck", options.bottleneck},
                     {"classes", options.classes},
                     {"stem", options.stem}},
                std::make_shared<ResNet>(options),
                {},
                {}};
  made.inputs = torch::randn({batches_in_turn, batch, 3, side, side});
  made.targets = torch::randint(options.classes, {batches_in_turn, batch}, torch::kLong);
  made.flops = flops_per_multiply * static_cast<double>(batch) * multiplies_of(options, side);
  return made;
}

inline Workload gpt(std::string name, const GptOptions& options, std::int64_t batch) {
  Workload made{std::move(name),
                Json{{"kind", "gpt"},
                     {"vocabulary", options.vocabulary},
                     {"context", options.context},
                     {"width", options.width},
                     {"heads", options.heads},
                     {"blocks", options.blocks}},
                std::make_shared<Gpt>(options),
                {},
                {}};
  const auto text = torch::randint(options.vocabulary, {batches_in_turn, batch, options.context + 1}, torch::kLong);
  made.inputs = text.narrow(2, 0, options.context).contiguous();
  made.targets = text.narrow(2, 1, options.context).contiguous();
  const double tokens = static_cast<double>(batch * options.context), width = static_cast<double>(options.width);
  const double linear =
      static_cast<double>(options.blocks) * 12 * width * width + width * static_cast<double>(options.vocabulary);
  // Both products of attention, half of them masked but computed all the same by most kernels: counted whole.
  const double attention = static_cast<double>(options.blocks) * 2 * static_cast<double>(options.context) * width;
  made.flops = flops_per_multiply * tokens * (linear + attention);
  return made;
}

/// The workload of that name. `batch` 0: its own.
inline Workload workload(const std::string& name, std::int64_t batch = 0) {
  torch::manual_seed(1);
  const auto sized = [batch](std::int64_t own) { return batch > 0 ? batch : own; };
  if (name == "W0") return one_weight();
  if (name == "W1") return mlp(name, {64, 64, 10}, sized(32));
  if (name == "W2") return mlp(name, {784, 1024, 1024, 10}, sized(256));
  if (name == "W3b32") return mlp(name, {1024, 4096, 4096, 1024}, sized(32));
  if (name == "W3b256") return mlp(name, {1024, 4096, 4096, 1024}, sized(256));
  if (name == "W4") return resnet(name, {}, sized(16), 32);
  if (name == "W5") return gpt(name, {}, sized(12));
  if (name == "W6")
    return gpt(name, {.vocabulary = 8192, .context = 128, .width = 256, .heads = 8, .blocks = 6}, sized(8));
  if (name == "G1") return mlp(name, {4096, 4096, 4096, 4096}, sized(512));
  if (name == "G2") return resnet(name, {{3, 4, 6, 3}, true, 1000, 7}, sized(256), 224);
  const GptOptions gpt2{.vocabulary = 50257, .context = 1024, .width = 768, .heads = 12, .blocks = 12};
  if (name == "G3") return gpt(name, gpt2, sized(16));
  if (name == "G3b1") {
    GptOptions shorter = gpt2;
    shorter.context = 256;
    return gpt(name, shorter, sized(1));
  }
  // grid/WIDTH: an MLP of three layers of that width.
  if (name.starts_with("grid/")) {
    const std::int64_t width = std::stoll(name.substr(5));
    return mlp(name, {width, width, width, width}, sized(32));
  }
  throw std::invalid_argument("There is no workload " + name +
                              ". There are W0 to W6 (W3b32, W3b256), G1 to G3, G3b1, grid/WIDTH.");
}

}  // namespace bench
