// What only a GPU can show, as one program with plain output:
//
//     frugal_gpu_tests              every check, on CUDA device 0; exit code 77 and a sentence where there is none
//     frugal_gpu_tests --rehearse   the checks that mean something without a GPU, on the CPU
//
// Exit code 1: a check failed.
#include <torch/torch.h>

#include <frugal/amp_policy.hpp>
#include <frugal/averager.hpp>
#include <frugal/batches.hpp>
#include <frugal/calibration.hpp>
#include <frugal/capability.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/fused_step.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/grad_clip.hpp>
#include <frugal/schedule.hpp>
#include <frugal/testing.hpp>
#include <frugal/trainer.hpp>

#include <ATen/record_function.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

// Some checks ask CUDA itself: they are there where the program is linked with a toolkit.
#if defined(FRUGAL_CUDA_TOOLKIT) && __has_include(<cuda_runtime_api.h>)
#define GPU_TESTS_ASK_CUDA 1
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#include "cublas_probe.hpp"
#else
#define GPU_TESTS_ASK_CUDA 0
#endif

namespace {

using namespace frugal;

// Why a check could not be made here.
struct NotHere : std::runtime_error { using std::runtime_error::runtime_error; };
void need(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

class Report {
 public:
  void check(std::string_view name, auto&& body) {
    std::cout << name << ": " << std::flush;
    try {
      body();
      ++passed_;
      std::cout << "ok" << std::endl;
    } catch (const NotHere& why) {
      std::cout << "not checked, " << why.what() << std::endl;
    } catch (const c10::Error& error) { fail(error.what_without_backtrace()); } catch (const std::exception& error) {
      fail(error.what());
    }
  }
  int conclude() const {
    std::cout << passed_ << " checks passed, " << failed_ << " failed" << std::endl;
    return failed_ == 0 && passed_ > 0 ? 0 : 1;
  }

 private:
  void fail(const std::string& why) {
    ++failed_;
    std::cout << "FAILED, " << why << std::endl;
  }
  int passed_ = 0, failed_ = 0;
};

// A GPU says itself what it can do; the CPU of a rehearsal is told that it can do everything.
template <class Tag>
AmpPolicy<Tag> amp_on(at::Device device, AmpOptions options = {}) {
  if (device.is_cuda()) return AmpPolicy<Tag>(device, options);
  return AmpPolicy<Tag>(device, Capability{.device = device.type(), .cpu_bf16 = true, .cpu_fp16 = true}, options);
}

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(32, 64));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(64, 8));
  torch::Tensor forward(const torch::Tensor& inputs) { return second(first(inputs).relu()); }
};
TORCH_MODULE(Net);

struct MeanLoss {
  torch::Tensor operator()(Net& net, const Batch& batch) const {
    return torch::mse_loss(net(batch.inputs), batch.targets);
  }
};

struct Training {
  at::Device device;
  Net net = make();
  torch::optim::AdamW optimizer{on(device, net)->parameters(), torch::optim::AdamWOptions(0.01)};
  Batch batch = data(device, 64);

  static Net make() {
    torch::manual_seed(1);
    return {};
  }
  static Net& on(at::Device device, Net& net) {
    net->to(device);
    return net;
  }
  static Batch data(at::Device device, std::int64_t samples) {
    torch::manual_seed(2);
    const torch::Tensor inputs = torch::randn({samples, 32}), rule = torch::randn({32, 8}) * 0.2;
    return {inputs.to(device), inputs.mm(rule).to(device)};
  }
  double loss() {
    const torch::NoGradGuard off;
    return MeanLoss()(net, batch).item<double>();
  }
};

// ------------------------------------------------------------------------------------------------ no sync per step

// While it lives, whatever makes the host wait for the device throws.
#if GPU_TESTS_ASK_CUDA
class SyncIsAnError {
 public:
  SyncIsAnError() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~SyncIsAnError() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
  SyncIsAnError(const SyncIsAnError&) = delete;
  SyncIsAnError& operator=(const SyncIsAnError&) = delete;
};
#else
struct SyncIsAnError {
  ~SyncIsAnError() {}
};
#endif

void sync_is_seen(at::Device device) {
#if GPU_TESTS_ASK_CUDA
  if (!device.is_cuda()) throw NotHere("it takes a GPU");
  const torch::Tensor value = torch::ones({}, device);
  bool threw = false;
  try {
    const SyncIsAnError forbidden;
    value.item<double>();
  } catch (const std::exception&) { threw = true; }
  need(threw, "a read of a value went unnoticed: the checks below are blind");
#else
  (void)device;
  throw NotHere("it takes a build with the CUDA toolkit");
#endif
}

// Says so where a loop ran, but nothing would have noticed a sync.
void syncs_are_errors(at::Device device) {
  if (!GPU_TESTS_ASK_CUDA || !device.is_cuda())
    throw NotHere("the loop runs, but it takes a GPU and a build with the CUDA toolkit to notice a sync");
}

void steps_without_sync(at::Device device, auto... policies) {
  Training training{device};
  Trainer trainer{training.net, training.optimizer, MeanLoss{}, std::move(policies)...};
  for (int i = 0; i < 8; ++i) trainer.step(training.batch);  // everything that happens once has happened
  {
    const SyncIsAnError forbidden;
    for (int i = 0; i < 16; ++i) trainer.step(training.batch);
  }
  need(std::isfinite(trainer.progress().loss), "the loss is not finite");
  syncs_are_errors(device);
}
void batches_without_sync(at::Device device) {
  Training training{device};
  const Batch host = Training::data(at::kCPU, 256);
  const Batches batches(host.inputs, host.targets, {.batch_size = 32, .device = device});
  Trainer trainer{training.net, training.optimizer, MeanLoss{}};
  for (auto& batch : batches.epoch(0)) trainer.step(batch);
  const SyncIsAnError forbidden;
  for (auto& batch : batches.epoch(1)) trainer.step(batch);
  syncs_are_errors(device);
}

// Values that are read back to the host while it lives.
class Reads {
 public:
  Reads() {
    count = 0;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&Reads::seen).scopes({at::RecordScope::FUNCTION}));
  }
  ~Reads() { at::removeCallback(handle_); }
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;
  static inline std::atomic<int> count;

 private:
  static std::unique_ptr<at::ObserverContext> seen(const at::RecordFunction& function) {
    if (std::string_view(function.name()) == "aten::_local_scalar_dense") ++count;
    return nullptr;
  }
  at::CallbackHandle handle_;
};

void fp16_reads_once_per_window(at::Device device) {
  Training training{device};
  Trainer trainer{training.net,         training.optimizer, MeanLoss{},
                  amp_on<Fp16>(device), GradAccumulator(4), GradClip(1.0)};
  for (int i = 0; i < 8; ++i) trainer.step(training.batch);
  const Reads reads;
  for (int i = 0; i < 12; ++i) trainer.step(training.batch);
  need(Reads::count == 3, std::to_string(Reads::count) + " values were read back in 3 windows, one each is expected");
}

// Windows 3, 7 and 8 overflow; the first moments and the counters must not know.
void lagged_skips_are_exact_ones(at::Device device) {
  const auto train = [&](SkipDecision decision) {
    Training training{device};
    torch::optim::AdamW& optimizer = training.optimizer;
    Trainer trainer{training.net,
                    optimizer,
                    testing::OverflowAt{MeanLoss{}, {3, 7, 8}},
                    amp_on<Fp16>(device, {.scaler = {.init_scale = 1024}, .skip_decision = decision}),
                    FusedStep(),
                    Schedule(cosine(1000))};
    for (int i = 0; i < 12; ++i) trainer.step(training.batch);
    need(trainer.progress().step == 9 && trainer.progress().skipped == 3, "the steps were not counted");
    const auto& state = static_cast<torch::optim::AdamWParamState&>(*optimizer.state().begin()->second);
    need(state.step() == 9, "the optimizer's step number is " + std::to_string(state.step()) + ", not 9");
    need(trainer.template get<AmpPolicy<Fp16>>().scale_factor() == 128, "the scale did not back off three times");
    return torch::nn::utils::parameters_to_vector(training.net->parameters()).detach();
  };
  const auto exact = train(SkipDecision::exact), lagged = train(SkipDecision::lagged);
  need(torch::allclose(exact, lagged, 1e-4, 1e-6), "the weights differ");
}

// ----------------------------------------------------------------------------------------------------------- data

// The device is kept busy, so that the host runs far ahead of it: a batch whose memory is reused before the device has
// come to it arrives with another one's values.
void prefetched_batches_keep_their_values(at::Device device, std::int64_t prefetch) {
  constexpr std::int64_t count = 24, size = 1 << 16;
  const torch::Tensor numbers = torch::arange(count, torch::kFloat).unsqueeze(1).expand({count, size}).contiguous();
  const Batches batches(numbers, torch::arange(count),
                        {.batch_size = 1, .order = Order::sequential, .device = device, .prefetch = prefetch});
  const std::int64_t side = device.is_cuda() ? 4096 : 64;
  const torch::Tensor work = torch::rand({side, side}, device);
  std::vector<torch::Tensor> smallest, largest, targets;
  for (const auto& batch : batches.epoch(0)) {
    for (int i = 0; i < 8; ++i) torch::mm(work, work);
    smallest.push_back(batch.inputs.min()), largest.push_back(batch.inputs.max()),
        targets.push_back(batch.targets.sum());
  }
  need(std::ssize(smallest) == count, "batches are missing");
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const auto expected = static_cast<double>(i);
    need(smallest[at].item<double>() == expected && largest[at].item<double>() == expected &&
             targets[at].item<double>() == expected,
         "batch " + std::to_string(i) + " was used with the values of another one");
  }
}

// ------------------------------------------------------------------------------------------------------ precision

void capability_is_the_devices(at::Device device) {
#if GPU_TESTS_ASK_CUDA
  if (!device.is_cuda()) throw NotHere("it takes a GPU");
  cudaDeviceProp properties{};
  need(cudaGetDeviceProperties(&properties, 0) == cudaSuccess, "CUDA does not describe device 0");
  const Capability found = Capability::of(device);
  need(found.major == properties.major && found.minor == properties.minor,
       "Capability says " + std::to_string(found.major) + "." + std::to_string(found.minor) + ", CUDA says " +
           std::to_string(properties.major) + "." + std::to_string(properties.minor));
#else
  (void)device;
  throw NotHere("it takes a build with the CUDA toolkit");
#endif
}

void tf32_changes_bits_and_is_restored(at::Device device) {
  if (!device.is_cuda()) throw NotHere("it takes a GPU");
  if (!Capability::of(device).supports(Precision::tf32)) throw NotHere("this GPU has no TF32");
  torch::manual_seed(3);
  const torch::Tensor a = torch::randn({512, 512}, device), b = torch::randn({512, 512}, device);
  const torch::Tensor before = a.mm(b);
  {
    const AmpPolicy<Tf32> amp(device);
    need(amp.precision() == Precision::tf32, amp.reason());
    need(!torch::equal(a.mm(b), before), "products have the same bits: TF32 was not on");
    need(torch::allclose(a.mm(b), before, 1e-2, 0.5), "products are far from the exact ones");
    const AmpPolicy<Tf32> second(device);
  }
  need(torch::equal(a.mm(b), before), "products differ afterwards: TF32 is still on");
}

void overflow_in_one_of_two_dtypes_is_found(at::Device device) {
  for (const int infinite : {0, 1}) {
    std::vector<torch::Tensor> parameters{torch::ones({4}, at::TensorOptions(device).dtype(at::kHalf)),
                                          torch::ones({4}, at::TensorOptions(device).dtype(at::kFloat))};
    torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1));
    auto amp = amp_on<Fp16>(device);
    const double scale = amp.scale_factor();
    (void)amp.scale(torch::ones({}, device));
    for (torch::Tensor& parameter : parameters) parameter.mutable_grad() = torch::ones_like(parameter);
    parameters[static_cast<std::size_t>(infinite)].mutable_grad()[2] = std::numeric_limits<float>::infinity();
    const std::string where = infinite == 0 ? "float16" : "float32";
    amp.unscale(optimizer);
    need(!amp.step(optimizer), "an inf among the " + where + " gradients was not found");
    for (const torch::Tensor& parameter : parameters)
      need(torch::equal(parameter, torch::ones_like(parameter)), "a weight moved although there was an inf");
    need(amp.skipped() == 1 && amp.scale_factor() < scale, "the scale did not back off");
  }
}

template <class Tag>
void trains_close_to_fp32(at::Device device, double tolerance) {
  const auto trained = [&](auto... policies) {
    Training training{device};
    const double before = training.loss();
    Trainer trainer{training.net, training.optimizer, MeanLoss{}, std::move(policies)...};
    for (int i = 0; i < 60; ++i) trainer.step(training.batch);
    need(training.loss() < 0.5 * before, "the loss did not fall to half");
    return training.loss();
  };
  const double full = trained();
  const double half = trained(amp_on<Tag>(device, {.scaler = {.init_scale = 1024}}));
  need(std::abs(half - full) <= tolerance * full,
       "the loss is " + std::to_string(half) + ", in fp32 it is " + std::to_string(full));
}

void gradients_of_kept_casts(at::Device device) {
  const auto gradients = [&](WeightCasts casts) {
    Training training{device};
    auto amp = amp_on<Bf16>(device, {.weight_casts = casts});
    for (int i = 0; i < 3; ++i) {
      const auto loss = [&] {
        const auto guard = amp.autocast();
        return MeanLoss{}(training.net, training.batch);
      }();
      loss.backward();
    }
    std::vector<torch::Tensor> all;
    for (const torch::Tensor& parameter : training.net->parameters()) all.push_back(parameter.grad().cpu());
    return all;
  };
  const auto kept = gradients(WeightCasts::per_step), stock = gradients(WeightCasts::per_forward);
  for (std::size_t i = 0; i < kept.size(); ++i)
    need(torch::allclose(kept[i], stock[i], 1e-3, 1e-5), "gradient " + std::to_string(i) + " differs");
}

void calibrates(at::Device device) {
  Training training{device};
  const auto before = training.net->parameters().front().detach().clone();
  Trainer trainer{training.net, training.optimizer, MeanLoss{}, amp_on<Auto>(device), GradAccumulator(2), FusedStep()};
  const auto found = trainer.calibrate(training.batch);
  std::cout << found.reason << ' ';
  need(torch::equal(training.net->parameters().front(), before), "a weight moved");
  trainer.step(training.batch);
}

void bit_exact_runs_are_identical(at::Device device) {
  const auto run = [&] {
    Training training{device};
    Trainer trainer{training.net, training.optimizer, MeanLoss{}, AmpPolicy<BitExact>(device), GradAccumulator(2)};
    for (int i = 0; i < 40; ++i) trainer.step(training.batch);
    std::vector<torch::Tensor> weights;
    for (const torch::Tensor& parameter : training.net->parameters()) weights.push_back(parameter.detach().cpu());
    return weights;
  };
  const auto first = run(), second = run();
  for (std::size_t i = 0; i < first.size(); ++i)
    need(torch::equal(first[i], second[i]), "parameter " + std::to_string(i) + " differs between two runs");
}

// The average and the best weights, on the device and back.
void best_weights_come_back(at::Device device) {
  Training training{device};
  std::vector<std::vector<torch::Tensor>> seen;
  const std::vector<double> metrics{3, 1, 2};
  const auto validate = [&] {
    std::vector<torch::Tensor> now;
    for (const torch::Tensor& parameter : training.net->parameters()) now.push_back(parameter.detach().cpu());
    seen.push_back(now);
    return metrics.at(seen.size() - 1);
  };
  Trainer trainer{training.net, training.optimizer, MeanLoss{}, Averager({.decay = 0.9}),
                  EarlyStopper({.patience = 9})};
  trainer.fit(std::vector<Batch>(4, training.batch), validate, {.epochs = 3});
  const auto parameters = training.net->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    need(torch::equal(parameters[i].detach().cpu(), seen.at(1)[i]),
         "parameter " + std::to_string(i) + " is not the best one");
}

void cublas_works_beside_libtorch([[maybe_unused]] at::Device device) {
#if GPU_TESTS_ASK_CUDA
  if (!device.is_cuda()) throw NotHere("it takes a GPU");
  std::string name;
  const std::string problem = cublas_probe(name);
  need(problem.empty(), problem);
  std::cout << name << ", ";
#else
  throw NotHere("it takes a build with the CUDA toolkit");
#endif
}

int all_checks(at::Device device) {
  Report report;
  report.check("cuBLAS and LibTorch's CUDA in one process", [&] { cublas_works_beside_libtorch(device); });
  report.check("Capability is what CUDA says", [&] { capability_is_the_devices(device); });

  report.check("a read of a value is noticed", [&] { sync_is_seen(device); });
  const auto no_sync = [&](const std::string& name, auto make) {
    report.check("no sync per step: " + name,
                 [&] { std::apply([&](auto... p) { steps_without_sync(device, std::move(p)...); }, make()); });
  };
  const auto cosine_rate = [] { return Schedule(cosine(1000)); };
  no_sync("no policies", [] { return std::tuple<>(); });
  no_sync("GradAccumulator", [] { return std::tuple(GradAccumulator(4)); });
  no_sync("AmpPolicy<Fp32>", [&] { return std::tuple(amp_on<Fp32>(device)); });
  no_sync("AmpPolicy<Bf16>", [&] { return std::tuple(amp_on<Bf16>(device)); });
  no_sync("Schedule", [&] { return std::tuple(cosine_rate()); });
  no_sync("GradClip", [] { return std::tuple(GradClip(0.1)); });
  no_sync("GradClip::by_value", [] { return std::tuple(GradClip::by_value(0.01)); });
  no_sync("FusedStep", [] { return std::tuple(FusedStep()); });
  no_sync("GradClip and FusedStep", [] { return std::tuple(GradClip(0.1), FusedStep()); });
  no_sync("GradAccumulator, GradClip and FusedStep",
          [] { return std::tuple(GradAccumulator(4), GradClip(0.1), FusedStep()); });
  no_sync("weights cast once per step", [&] {
    return std::tuple(amp_on<Bf16>(device, {.weight_casts = WeightCasts::per_step}), GradAccumulator(4));
  });
  no_sync("AmpPolicy<Fp16> with lagged skips, GradAccumulator, GradClip and FusedStep", [&] {
    return std::tuple(amp_on<Fp16>(device, {.skip_decision = SkipDecision::lagged}), GradAccumulator(4), GradClip(0.1),
                      FusedStep());
  });
  no_sync("Averager", [] { return std::tuple(Averager()); });
  no_sync("all of them", [&] {
    return std::tuple(amp_on<Bf16>(device), GradAccumulator(4), GradClip(0.1), Averager(), cosine_rate(), FusedStep(),
                      EarlyStopper());
  });
  report.check("no sync per step: Batches on the way to the device", [&] { batches_without_sync(device); });
  report.check("fp16 reads one value per window", [&] { fp16_reads_once_per_window(device); });
  report.check("lagged skips end where exact ones do", [&] { lagged_skips_are_exact_ones(device); });

  report.check("a prefetched batch keeps its values under a busy device",
               [&] { prefetched_batches_keep_their_values(device, 0); });
  report.check("the same with a background thread", [&] { prefetched_batches_keep_their_values(device, 3); });

  report.check("TF32 changes bits and is restored", [&] { tf32_changes_bits_and_is_restored(device); });
  report.check("inf in one of two dtypes is found", [&] { overflow_in_one_of_two_dtypes_is_found(device); });
  report.check("fp16 trains close to fp32", [&] { trains_close_to_fp32<Fp16>(device, 0.1); });
  report.check("bf16 trains close to fp32", [&] { trains_close_to_fp32<Bf16>(device, 0.3); });
  report.check("weights cast once per step give the same gradients", [&] { gradients_of_kept_casts(device); });
  report.check("calibrate chooses and leaves no trace", [&] { calibrates(device); });
  report.check("two bit-exact runs are identical", [&] { bit_exact_runs_are_identical(device); });
  report.check("the best averaged weights come back", [&] { best_weights_come_back(device); });
  return report.conclude();
}

}  // namespace

int main(int count, char** arguments) {
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // bit-exact runs; read when CUDA starts
  if (count > 1 && std::string_view(arguments[1]) == "--rehearse") return all_checks(at::kCPU);
  if (!torch::cuda::is_available()) {
    std::cout << "skipped: no CUDA device is usable here (a CPU build of LibTorch, no GPU, or no driver)" << std::endl;
    return 77;
  }
  return all_checks(at::Device(at::kCUDA, 0));
}
