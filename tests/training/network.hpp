#pragma once

#include "support/catch.hpp"

#include <frugal/batches.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

/// A small network with and without batch norm, data for it, and comparisons bit for bit.
namespace network {

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 3));
  torch::Tensor forward(const torch::Tensor& inputs) { return second(first(inputs).tanh()); }
};
TORCH_MODULE(Net);

struct NormedNetImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 8));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 3));
  torch::Tensor forward(const torch::Tensor& inputs) { return second(norm(first(inputs)).relu()); }
};
TORCH_MODULE(NormedNet);

/// A new network whose weights are the same every time, in double precision where exactness is at stake.
template <class Model = Net>
Model make(torch::Dtype dtype = torch::kFloat) {
  torch::manual_seed(7);
  Model model;
  model->to(dtype);
  return model;
}

struct Data { torch::Tensor inputs, targets; };
inline Data data(std::int64_t samples, torch::Dtype dtype = torch::kFloat) {
  torch::manual_seed(11);
  torch::Tensor inputs = torch::randn({samples, 6}, dtype);
  const torch::Tensor rule = torch::randn({6, 3}, dtype);
  return {inputs, inputs.mm(rule).sin()};
}

using frugal::Batch;

/// Consecutive batches of these sizes.
inline std::vector<Batch> cut(const Data& all, const std::vector<std::int64_t>& sizes) {
  std::vector<Batch> batches;
  std::int64_t from = 0;
  for (const std::int64_t size : sizes) {
    batches.push_back({all.inputs.narrow(0, from, size), all.targets.narrow(0, from, size)});
    from += size;
  }
  return batches;
}

/// The loss function that the tests hand to the Trainer.
struct MeanLoss {
  torch::Tensor operator()(auto& model, const Batch& batch) const {
    return torch::mse_loss(model(batch.inputs), batch.targets);
  }
};

/// Copies of all parameters and buffers.
using State = std::vector<std::pair<std::string, torch::Tensor>>;
inline State state_of(const torch::nn::Module& model) {
  State state;
  for (const auto& item : model.named_parameters()) state.emplace_back(item.key(), item.value().detach().clone());
  for (const auto& item : model.named_buffers()) state.emplace_back(item.key(), item.value().detach().clone());
  return state;
}
inline bool same_bits(const State& a, const State& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].first != b[i].first || !torch::equal(a[i].second, b[i].second)) return false;
  return true;
}
inline double distance(const State& a, const State& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, (a.at(i).second - b.at(i).second).abs().max().item<double>());
  return largest;
}

inline torch::optim::SGD sgd(const std::vector<torch::Tensor>& parameters) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}
inline torch::optim::AdamW adamw(const std::vector<torch::Tensor>& parameters) {
  return torch::optim::AdamW(parameters, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
}

/// The plain loop: the reference that everything is compared with.
template <class Model, class Optimizer>
void train_by_hand(Model& model, Optimizer& optimizer, const auto& batches, std::int64_t epochs) {
  model->train();
  for (std::int64_t epoch = 0; epoch < epochs; ++epoch)
    for (const Batch& batch : batches) {
      MeanLoss()(model, batch).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
}

}  // namespace network
