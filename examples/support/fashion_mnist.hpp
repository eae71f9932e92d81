#pragma once

#include <torch/torch.h>
#include <zlib.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

// Fashion-MNIST (Xiao, Rasul and Vollgraf 2017): 70000 grey images of 28 x 28 pixels in ten classes.
namespace examples {

struct Images {
  torch::Tensor pixels;  // float [n, 1, 28, 28], mean 0 and deviation 1 over the data set
  torch::Tensor labels;  // int64 [n]

  std::int64_t size() const { return pixels.size(0); }
};
struct Data { Images train, validation, test; };

// The bytes of an IDX file. zlib reads plain files as well as compressed ones.
inline torch::Tensor read_idx(const std::filesystem::path& file) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> in(gzopen(file.c_str(), "rb"), gzclose);
  const auto read = [&](void* to, std::int64_t bytes) {
    if (!in || gzread(in.get(), to, static_cast<unsigned>(bytes)) != bytes)
      throw std::runtime_error(file.string() + " is not a complete IDX file.");
  };
  std::array<std::uint8_t, 4> magic{}, big_endian{};
  read(magic.data(), 4);
  if (magic[0] != 0 || magic[1] != 0 || magic[2] != 8) throw std::runtime_error(file.string() + " holds no IDX bytes.");
  std::vector<std::int64_t> shape(magic[3]);
  for (auto& size : shape) {
    read(big_endian.data(), 4);
    size = big_endian[0] << 24 | big_endian[1] << 16 | big_endian[2] << 8 | big_endian[3];
  }
  auto values = torch::empty(shape, torch::kByte);
  read(values.data_ptr(), values.numel());
  return values;
}

// Where the data set is: the folder that the user named, else $FRUGAL_DATA, else where Debian's package puts it.
inline std::filesystem::path fashion_mnist_folder(const std::string& given) {
  const char* variable = std::getenv("FRUGAL_DATA");
  const std::filesystem::path folder = !given.empty() ? given
                                       : variable     ? variable
                                                      : "/usr/share/datasets/fashion-mnist";
  for (const char* suffix : {"", ".gz"})
    if (exists(folder / ("train-images-idx3-ubyte" + std::string(suffix)))) return folder;
  throw std::runtime_error(
      "There is no Fashion-MNIST in " + folder.string() +
      ". Install the Debian or Ubuntu package dataset-fashion-mnist, or name the folder that holds "
      "train-images-idx3-ubyte (.gz) and its three companions with --data or FRUGAL_DATA.");
}

inline Images fashion_mnist_part(const std::filesystem::path& folder, const std::string& part) {
  const auto read = [&](const std::string& name) {
    const std::string plain = (folder / (part + name)).string();
    return read_idx(std::filesystem::exists(plain) ? plain : plain + ".gz");
  };
  const auto pixels = read("-images-idx3-ubyte").unsqueeze(1).to(torch::kFloat);
  return {pixels.div_(255).sub_(0.2860).div_(0.3530), read("-labels-idx1-ubyte").to(torch::kLong)};
}

// The last 6000 of the 60000 training images are held out for validation; the test images only ever judge the result.
inline Data fashion_mnist(const std::string& given = {}) {
  const auto folder = fashion_mnist_folder(given);
  const Images all = fashion_mnist_part(folder, "train");
  const std::int64_t held_out = all.size() / 10, rest = all.size() - held_out;
  return {{all.pixels.narrow(0, 0, rest), all.labels.narrow(0, 0, rest)},
          {all.pixels.narrow(0, rest, held_out), all.labels.narrow(0, rest, held_out)},
          fashion_mnist_part(folder, "t10k")};
}

// A data set of the same shape that is learned in seconds: one random picture for each class, under noise.
inline Data synthetic_images(std::int64_t training_images = 520, double noise = 1) {
  const auto classes = torch::randn({10, 1, 28, 28});
  const auto draw = [&](std::int64_t n) {
    const auto labels = torch::arange(n).remainder(10);
    return Images{classes.index_select(0, labels).add(torch::randn({n, 1, 28, 28}), noise), labels};
  };
  return {draw(training_images), draw(250), draw(250)};
}

}  // namespace examples
