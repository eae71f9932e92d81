// A GAN: two models and two optimizers in one hand loop, which stays short. One AmpPolicy serves both optimizers: each is
// unscaled and skipped on its own, and the loss scale moves once for both. It learns to draw points on a circle, and is
// compared with the same loop in plain LibTorch.

#include <frugal/amp_policy.hpp>
#include <frugal/update.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <iostream>
#include <numbers>
#include <utility>

constexpr std::int64_t batch = 64, steps = 100;

struct Gan {
  // How badly the judge tells drawn points from those on the circle, and how badly the artist fools it.
  torch::Tensor judge_loss(const torch::Tensor& drawn) {
    const auto angle = torch::rand({batch}) * (2 * std::numbers::pi);
    const auto real = torch::stack({angle.cos(), angle.sin()}, 1);
    return torch::binary_cross_entropy_with_logits(judge->forward(real), torch::ones({batch, 1})) +
           torch::binary_cross_entropy_with_logits(judge->forward(drawn.detach()), torch::zeros({batch, 1}));
  }
  torch::Tensor artist_loss(const torch::Tensor& drawn) {
    return torch::binary_cross_entropy_with_logits(judge->forward(drawn), torch::ones({batch, 1}));
  }
  torch::Tensor draw() { return artist->forward(torch::randn({batch, 8})); }

  torch::nn::Sequential artist{torch::nn::Linear(8, 32), torch::nn::ReLU(), torch::nn::Linear(32, 2)};
  torch::nn::Sequential judge{torch::nn::Linear(2, 32), torch::nn::ReLU(), torch::nn::Linear(32, 1)};
  torch::optim::Adam for_artist{artist->parameters(), 1e-3};
  torch::optim::Adam for_judge{judge->parameters(), 1e-3};
  double last_loss = 0;
};

Gan with_frugal(auto amp) {
  torch::manual_seed(1);
  Gan gan;
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto [drawn, judge_loss] = [&] {
      const auto guard = amp.autocast();
      const auto points = gan.draw();
      return std::pair(points, gan.judge_loss(points));
    }();
    if (frugal::backward(judge_loss, batch, amp)) frugal::update(gan.for_judge, amp);

    const torch::Tensor artist_loss = [&] {
      const auto guard = amp.autocast();
      return gan.artist_loss(drawn);
    }();
    if (frugal::backward(artist_loss, batch, amp)) frugal::update(gan.for_artist, amp);
    gan.for_judge.zero_grad();  // the artist's loss went through the judge
    gan.last_loss = artist_loss.item<double>();
  }
  return gan;
}

Gan plain() {
  torch::manual_seed(1);
  Gan gan;
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto drawn = gan.draw();
    gan.judge_loss(drawn).backward();
    gan.for_judge.step();
    gan.for_judge.zero_grad();

    const auto artist_loss = gan.artist_loss(drawn);
    artist_loss.backward();
    gan.for_artist.step();
    gan.for_artist.zero_grad();
    gan.for_judge.zero_grad();
    gan.last_loss = artist_loss.item<double>();
  }
  return gan;
}

// The largest difference between the weights of both pairs.
double distance(const Gan& one, const Gan& other) {
  double largest = 0;
  for (const auto model : {&Gan::artist, &Gan::judge}) {
    const auto mine = (one.*model)->parameters(), theirs = (other.*model)->parameters();
    for (std::size_t i = 0; i < mine.size(); ++i)
      largest = std::max(largest, mine[i].sub(theirs[i]).abs().max().item<double>());
  }
  return largest;
}

// Needs no data and ends in a second: --smoke changes nothing.
int main() {
  const auto cpu = torch::kCPU;
  const frugal::Capability with_fp16{.device = cpu, .cpu_fp16 = true};  // float16 works on any CPU, if slowly on most
  const Gan reference = plain();
  const Gan full = with_frugal(frugal::AmpPolicy<frugal::Fp32>(cpu));
  const Gan mixed = with_frugal(frugal::AmpPolicy<frugal::Auto>(cpu));
  const Gan half = with_frugal(frugal::AmpPolicy<frugal::Fp16>(cpu, with_fp16));

  std::cout << "the artist's last loss, and how far the weights are from those of the plain loop\n";
  std::cout << "  plain " << reference.last_loss << '\n';
  std::cout << "  full precision " << full.last_loss << ", " << distance(full, reference) << '\n';
  std::cout << "  as the hardware allows " << mixed.last_loss << ", " << distance(mixed, reference) << '\n';
  std::cout << "  float16 with a loss scale " << half.last_loss << ", " << distance(half, reference) << '\n';

  const bool same = full.last_loss == reference.last_loss && distance(full, reference) == 0;
  const bool close = distance(mixed, reference) < 0.05 && distance(half, reference) < 0.05;
  return same && close ? 0 : 1;
}
