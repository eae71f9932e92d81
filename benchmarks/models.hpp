#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// The networks of the workloads. peers.py has the same ones in Python, with their parameters in the same order.
namespace bench {

// One type for all of them, so that a loop is compiled once.
struct Network : torch::nn::Module { virtual torch::Tensor forward(const torch::Tensor& inputs) = 0; };

struct Mlp final : Network {
  explicit Mlp(const std::vector<std::int64_t>& sizes) {
    for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
      if (i > 0) layers->push_back(torch::nn::ReLU());
      layers->push_back(torch::nn::Linear(sizes[i], sizes[i + 1]));
    }
    register_module("layers", layers);
  }
  torch::Tensor forward(const torch::Tensor& inputs) override { return layers->forward(inputs); }

  torch::nn::Sequential layers;
};

// One weight: what is left of a step when there is no model.
struct OneWeight final : Network {
  OneWeight() : weight(register_parameter("weight", torch::ones({1}))) {}
  torch::Tensor forward(const torch::Tensor& inputs) override { return inputs.mul(weight); }

  torch::Tensor weight;
};

struct ResNetOptions {
  std::vector<std::int64_t> blocks = {2, 2, 2, 2};
  bool bottleneck = false;
  std::int64_t classes = 10;
  std::int64_t stem = 3;  // 3: for images of 32 x 32; 7: for 224 x 224
};

inline torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t size, std::int64_t stride) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

// He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2015; the stride of a bottleneck is in its 3 x 3.
struct ResidualBlock final : torch::nn::Module {
  ResidualBlock(std::int64_t in, std::int64_t width, std::int64_t stride, bool bottleneck) {
    const std::int64_t out = bottleneck ? 4 * width : width;
    if (bottleneck) {
      add(in, width, 1, 1), add(width, width, 3, stride), add(width, out, 1, 1);
    } else {
      add(in, width, 3, stride), add(width, width, 3, 1);
    }
    if (in != out || stride != 1)
      shortcut = register_module("shortcut",
                                 torch::nn::Sequential(convolution(in, out, 1, stride), torch::nn::BatchNorm2d(out)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y = x;
    for (std::size_t i = 0; i < convolutions.size(); ++i) {
      y = norms[i](convolutions[i](y));
      if (i + 1 < convolutions.size()) y = y.relu_();
    }
    return (shortcut.is_empty() ? y.add_(x) : y.add_(shortcut->forward(x))).relu_();
  }

  std::vector<torch::nn::Conv2d> convolutions;
  std::vector<torch::nn::BatchNorm2d> norms;
  torch::nn::Sequential shortcut = nullptr;

 private:
  void add(std::int64_t in, std::int64_t out, std::int64_t size, std::int64_t stride) {
    const auto number = std::to_string(convolutions.size() + 1);
    convolutions.push_back(register_module("conv" + number, convolution(in, out, size, stride)));
    norms.push_back(register_module("norm" + number, torch::nn::BatchNorm2d(out)));
  }
};

struct ResNet final : Network {
  explicit ResNet(const ResNetOptions& options) : stem_size(options.stem) {
    stem = register_module("stem", convolution(3, 64, options.stem, options.stem == 3 ? 1 : 2));
    stem_norm = register_module("stem_norm", torch::nn::BatchNorm2d(64));
    std::int64_t in = 64;
    for (std::size_t stage = 0; stage < options.blocks.size(); ++stage) {
      const std::int64_t width = 64 << stage;
      for (std::int64_t i = 0; i < options.blocks[stage]; ++i) {
        const std::int64_t stride = stage > 0 && i == 0 ? 2 : 1;
        blocks.push_back(register_module("block" + std::to_string(blocks.size()),
                                         std::make_shared<ResidualBlock>(in, width, stride, options.bottleneck)));
        in = options.bottleneck ? 4 * width : width;
      }
    }
    head = register_module("head", torch::nn::Linear(in, options.classes));
  }
  torch::Tensor forward(const torch::Tensor& images) override {
    torch::Tensor x = stem_norm(stem(images)).relu_();
    if (stem_size != 3) x = torch::max_pool2d(x, 3, 2, 1);
    for (const auto& block : blocks) x = block->forward(x);
    return head(torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
  }

  std::int64_t stem_size;
  torch::nn::Conv2d stem = nullptr;
  torch::nn::BatchNorm2d stem_norm = nullptr;
  std::vector<std::shared_ptr<ResidualBlock>> blocks;
  torch::nn::Linear head = nullptr;
};

struct GptOptions { std::int64_t vocabulary = 256, context = 64, width = 128, heads = 4, blocks = 4; };

struct GptBlock final : torch::nn::Module {
  explicit GptBlock(const GptOptions& options) : heads(options.heads) {
    const std::int64_t width = options.width;
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    mix = register_module("mix", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto n = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = mix(norm1(x)).view({n, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const auto seen = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    const auto y = x + out(seen.transpose(1, 2).reshape({n, length, width}));
    return y + down(torch::gelu(up(norm2(y))));
  }

  std::int64_t heads;
  torch::nn::LayerNorm norm1 = nullptr, norm2 = nullptr;
  torch::nn::Linear mix = nullptr, out = nullptr, up = nullptr, down = nullptr;
};

struct Gpt final : Network {
  explicit Gpt(const GptOptions& options) {
    tokens = register_module("tokens", torch::nn::Embedding(options.vocabulary, options.width));
    places = register_module("places", torch::nn::Embedding(options.context, options.width));
    for (std::int64_t i = 0; i < options.blocks; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<GptBlock>(options)));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
    head = register_module("head",
                           torch::nn::Linear(torch::nn::LinearOptions(options.width, options.vocabulary).bias(false)));
    const torch::NoGradGuard no_grad;
    for (auto& weights : parameters())
      if (weights.dim() > 1) weights.normal_(0, 0.02);
  }
  torch::Tensor forward(const torch::Tensor& text) override {
    auto x = tokens(text) + places->weight.narrow(0, 0, text.size(1));
    for (const auto& block : blocks) x = block->forward(x);
    return head(norm(x));
  }

  torch::nn::Embedding tokens = nullptr, places = nullptr;
  std::vector<std::shared_ptr<GptBlock>> blocks;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Linear head = nullptr;
};

}  // namespace bench
