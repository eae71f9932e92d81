#pragma once

#include "text.hpp"

#include <torch/torch.h>

#include <cstdint>
#include <string>

namespace examples {

struct GptOptions {
  std::int64_t context = 128;  // characters that it sees
  std::int64_t width = 128;
  std::int64_t heads = 4;
  std::int64_t blocks = 4;
};

// Attention over the characters so far, then two layers on each; both on normalized inputs, and added to what comes in.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptOptions& options)
      : heads(options.heads),
        before_attention(torch::nn::LayerNormOptions({options.width})),
        before_layers(torch::nn::LayerNormOptions({options.width})),
        mix(options.width, 3 * options.width),
        out(options.width, options.width),
        up(options.width, 4 * options.width),
        down(4 * options.width, options.width) {
    register_module("before_attention", before_attention), register_module("before_layers", before_layers);
    register_module("mix", mix), register_module("out", out);
    register_module("up", up), register_module("down", down);
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto n = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = mix(before_attention(x)).view({n, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const auto seen = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + out(seen.transpose(1, 2).reshape({n, length, width}));
    return x + down(torch::gelu(up(before_layers(x))));
  }

  std::int64_t heads;
  torch::nn::LayerNorm before_attention, before_layers;
  torch::nn::Linear mix, out, up, down;
};
TORCH_MODULE(Block);

// A small GPT: from characters [n, length] to the logits [n, length, 256] of the next ones. Embedding and output layer
// share their weights.
struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptOptions& options)
      : context(options.context),
        of_character(characters, options.width),
        of_place(options.context, options.width),
        before_output(torch::nn::LayerNormOptions({options.width})) {
    register_module("of_character", of_character), register_module("of_place", of_place);
    register_module("blocks", blocks), register_module("before_output", before_output);
    for (std::int64_t i = 0; i < options.blocks; ++i) blocks->push_back(Block(options));
    const torch::NoGradGuard no_grad;
    for (auto& weights : parameters())
      if (weights.dim() > 1) weights.normal_(0, 0.02);
  }

  torch::Tensor forward(const torch::Tensor& text) {
    auto x = of_character(text) + of_place->weight.narrow(0, 0, text.size(1));
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    return torch::linear(before_output(x), of_character->weight);
  }

  std::int64_t context;
  torch::nn::Embedding of_character, of_place;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm before_output;
};
TORCH_MODULE(Gpt);

// The mean loss per character, padding aside.
inline torch::Tensor loss_per_character(Gpt& model, const Windows& windows) {
  const auto logits = model(windows.inputs).flatten(0, 1);
  return torch::nn::functional::cross_entropy(logits, windows.targets.flatten(),
                                              torch::nn::functional::CrossEntropyFuncOptions().ignore_index(ignored));
}

// A paragraph that the model writes. A temperature below 1 prefers what is likely.
inline std::string sample(Gpt& model, std::int64_t longest, double temperature) {
  const torch::NoGradGuard no_grad;
  const auto device = model->of_character->weight.device();
  auto text = torch::zeros({1, 1}, torch::TensorOptions(device).dtype(torch::kLong));
  std::string written;
  while (static_cast<std::int64_t>(written.size()) < longest) {
    const auto seen = text.narrow(1, std::max<std::int64_t>(0, text.size(1) - model->context),
                                  std::min(text.size(1), model->context));
    const auto logits = model(seen).select(1, seen.size(1) - 1).to(torch::kFloat);
    const auto next = torch::multinomial(torch::softmax(logits / temperature, -1), 1);
    const auto character = static_cast<char>(next.item<std::int64_t>());
    if (character == 0) break;
    written += character;
    text = torch::cat({text, next}, 1);
  }
  return written;
}

}  // namespace examples
