#pragma once

#include "fashion_mnist.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>

namespace examples {

// A small convolutional network for images of 28 x 28 pixels in ten classes. Strides instead of pooling: pooling would
// take most of the time on a CPU.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    using namespace torch::nn;
    layers = register_module("layers", Sequential(Conv2d(Conv2dOptions(1, 32, 5).stride(2).padding(2)), ReLU(),
                                                  Conv2d(Conv2dOptions(32, 64, 3).stride(2).padding(1)), ReLU(),
                                                  Flatten(), Linear(64 * 7 * 7, 128), ReLU(), Linear(128, 10)));
  }
  torch::Tensor forward(const torch::Tensor& pixels) { return layers->forward(pixels); }

  torch::nn::Sequential layers = nullptr;
};
TORCH_MODULE(Net);

// Share of the images that the model puts into the right class, in percent.
inline double accuracy(Net& model, const Images& images) {
  const torch::NoGradGuard no_grad;
  const auto device = model->parameters().front().device();
  auto right = torch::zeros({}, torch::TensorOptions(device).dtype(torch::kLong));
  for (std::int64_t at = 0; at < images.size(); at += 250) {
    const std::int64_t n = std::min<std::int64_t>(250, images.size() - at);
    const auto pixels = images.pixels.narrow(0, at, n).to(device), labels = images.labels.narrow(0, at, n).to(device);
    right += model(pixels).argmax(1).eq(labels).sum();
  }
  return 100.0 * right.item<double>() / static_cast<double>(images.size());
}

}  // namespace examples
