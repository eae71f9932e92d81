#pragma once

#include "fashion_mnist.hpp"
#include "net.hpp"

#include <torch/torch.h>

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace examples {

// Lets LibTorch's DataLoader cut whole mini-batches out of the images.
class ImageDataset : public torch::data::datasets::BatchDataset<ImageDataset, torch::data::Example<>> {
 public:
  explicit ImageDataset(Images images) : images_(std::move(images)) {}

  torch::data::Example<> get_batch(c10::ArrayRef<std::size_t> chosen) override {
    const std::vector<std::int64_t> rows(chosen.begin(), chosen.end());
    const auto index = torch::tensor(rows, torch::kLong).to(images_.pixels.device());
    return {images_.pixels.index_select(0, index), images_.labels.index_select(0, index)};
  }
  std::optional<std::size_t> size() const override { return static_cast<std::size_t>(images_.size()); }

 private:
  Images images_;
};

// What the small examples have in common.
//
//     example [--data DIR]   trains on Fashion-MNIST
//     example --smoke        trains on synthetic images and checks what the example claims; ends in seconds
class Task {
 public:
  Task(int argc, char** argv) try {
    std::string folder;
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      if (argument == "--smoke") smoke_ = true;
      else if (argument == "--data" && i + 1 < argc) folder = argv[++i];
      else throw std::invalid_argument(std::string("usage: ") + argv[0] + " [--data DIR | --smoke]");
    }
    torch::set_num_threads(1);  // more gain little on a network this small, and lose much on a busy machine
    torch::manual_seed(1);      // the synthetic images too: other ones on every run break a claim now and then
    data_ = smoke_ ? synthetic_images() : fashion_mnist(folder);
    for (Images* part : {&data_.train, &data_.validation, &data_.test}) {
      part->pixels = part->pixels.to(device);
      part->labels = part->labels.to(device);
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    std::exit(2);
  }

  // The training images, in another order in every epoch. Made of the default generator, as all that is random here.
  auto loader(std::size_t batch_size) const {
    return torch::data::make_data_loader(ImageDataset(data_.train), batch_size);
  }
  const Images& train() const { return data_.train; }
  // On the validation images.
  double accuracy(Net& model) const { return examples::accuracy(model, data_.validation); }
  double loss(Net& model) const {
    const torch::NoGradGuard no_grad;
    return torch::cross_entropy_loss(model(data_.validation.pixels), data_.validation.labels).item<double>();
  }

  bool smoke() const { return smoke_; }
  // What main() returns. The smoke form checks what the example claims.
  int check(const char* claim, auto&& holds) const {
    if (!smoke_ || holds()) return 0;
    std::cerr << "not true: " << claim << '\n';
    return 1;
  }

  torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  std::int64_t epochs = 3;

 private:
  bool smoke_ = false;
  Data data_;
};

}  // namespace examples
