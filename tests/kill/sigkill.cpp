// Kills training runs with SIGKILL at random moments, restarts each until it is through, and holds what remains against a
// run that nobody disturbed: bit for bit. Plain output; exit code 0 when all runs agree.
//
//     sigkill [KILLS]

#include <frugal/frugal.hpp>

#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    using namespace torch::nn;
    layers =
        register_module("layers", Sequential(Linear(16, 64), BatchNorm1d(64), ReLU(), Dropout(0.2), Linear(64, 4)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers = nullptr;
};
TORCH_MODULE(Net);

// Whether an attempt before this one came as far as a checkpoint.
bool has_checkpoint(const std::filesystem::path& directory) {
  if (!std::filesystem::exists(directory)) return false;
  for (const auto& file : std::filesystem::directory_iterator(directory))
    if (file.path().extension() == ".safetensors") return true;
  return false;
}

// One attempt: continues what is in the directory, and leaves its weights in `result` when it is through.
void train(const std::filesystem::path& directory, const std::filesystem::path& result) {
  torch::set_num_threads(1);
  torch::manual_seed(has_checkpoint(directory) ? static_cast<std::uint64_t>(getpid()) : 1);
  const auto inputs = torch::sin(torch::arange(480 * 16).to(torch::kFloat).mul(1.3)).reshape({480, 16});
  const auto targets = inputs.argmax(1).remainder(4);
  const frugal::Batches batches(inputs, targets, {.batch_size = 32, .micro_batch = 16, .seed = 2});
  Net model;
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);
  const auto loss = [](Net& net, const frugal::Batch& batch) {
    return torch::cross_entropy_loss(net(batch.inputs), batch.targets);
  };
  frugal::Trainer trainer{model,
                          optimizer,
                          loss,
                          frugal::GradAccumulator(batches.steps()),
                          frugal::FusedStep{},
                          frugal::Schedule(frugal::warmup(5, frugal::cosine(100))),
                          frugal::Averager({.decay = 0.9}),
                          frugal::EarlyStopper({.patience = 50}),
                          frugal::CheckpointManager({.directory = directory, .every_steps = 2})};
  trainer.resume();
  const auto validate = [&] {
    return torch::cross_entropy_loss(model(inputs), targets).add(torch::rand({}).mul(0.01)).item<double>();
  };
  trainer.fit(batches, validate, {.epochs = 6});

  std::ofstream out(result.string() + ".part", std::ios::binary);
  const auto write = [&](const torch::Tensor& tensor) {
    const auto plain = tensor.detach().contiguous();
    out.write(static_cast<const char*>(plain.const_data_ptr()), static_cast<std::streamsize>(plain.nbytes()));
  };
  for (const auto& tensor : model->parameters()) write(tensor);
  for (const auto& tensor : model->buffers()) write(tensor);
  out.close();
  std::filesystem::rename(result.string() + ".part", result);
}

// Runs an attempt in a process of its own and kills it after `limit`. True: it was through before.
bool attempt(const std::filesystem::path& directory, const std::filesystem::path& result,
             std::chrono::microseconds limit) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    try {
      train(directory, result);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "an attempt failed: %s\n", error.what());
      _exit(3);
    }
    _exit(0);
  }
  int status = 0;
  if (limit.count() > 0) {
    std::this_thread::sleep_for(limit);
    kill(child, SIGKILL);
  }
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) return false;
  if (WEXITSTATUS(status) != 0) std::exit(1);
  return true;
}

std::string bytes_of(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

int main(int argc, char** argv) {
  const int wanted = argc > 1 ? std::atoi(argv[1]) : 100;
  const auto folder = std::filesystem::temp_directory_path() / ("frugal-sigkill-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  const auto started = std::chrono::steady_clock::now();
  attempt(folder / "undisturbed", folder / "expected", {});
  const auto whole = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - started);
  const std::string expected = bytes_of(folder / "expected");

  std::mt19937 random(std::random_device{}());
  std::uniform_int_distribution<std::int64_t> moment(0, whole.count() / 2);
  int kills = 0, runs = 0, differ = 0;
  while (kills < wanted) {
    const auto directory = folder / ("run" + std::to_string(runs)), result = folder / ("result" + std::to_string(runs));
    while (!attempt(directory, result, std::chrono::microseconds(1 + moment(random)))) ++kills;
    ++runs;
    differ += bytes_of(result) != expected;
    std::filesystem::remove_all(directory);
  }
  std::printf("%d runs, killed %d times in all: %d differ from the undisturbed one (%zu bytes)\n", runs, kills, differ,
              expected.size());
  std::filesystem::remove_all(folder);
  return differ == 0 && !expected.empty() ? 0 : 1;
}
