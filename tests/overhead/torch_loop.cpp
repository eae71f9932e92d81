// Real LibTorch on one thread: a tiny network, so that whatever the loop adds is as large a share as it can be.
#include "measure.hpp"

#include <frugal/amp_policy.hpp>
#include <frugal/averager.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/fused_step.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/grad_clip.hpp>
#include <frugal/observers.hpp>
#include <frugal/schedule.hpp>
#include <frugal/trainer.hpp>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(4, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 3));
  at::Tensor forward(const at::Tensor& inputs) { return second(first(inputs).relu()); }
};
TORCH_MODULE(Net);

struct Batch {
  at::Tensor inputs = torch::randn({4, 4}), targets = torch::randn({4, 3});
  std::int64_t size() const { return inputs.size(0); }
};
struct MeanLoss {
  at::Tensor operator()(Net& net, const Batch& batch) const {
    return torch::nn::functional::mse_loss(net(batch.inputs), batch.targets);
  }
};

torch::optim::SGD sgd(Net& net) {
  return torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
}
torch::optim::AdamW adamw(Net& net) {
  return torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(0.001));
}

// zero_grad() without its detach_(), which allocates for every gradient.
void drop_gradients(torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups())
    for (at::Tensor& parameter : group.params()) parameter.mutable_grad().reset();
}

// All loops of one comparison train the same network by the same optimizer: tables with addresses as keys and the state
// of the heap are then the same too, which would otherwise make a difference of a few tenths of a percent.
template <class Optimizer>
struct Subject {
  Net net;
  Optimizer optimizer;
  explicit Subject(Optimizer (*make)(Net&)) : optimizer(make(net)) {}
};
template <class Optimizer>
struct Loop {
  Net& net;
  Optimizer& optimizer;
  MeanLoss loss{};
  explicit Loop(Subject<Optimizer>& subject) : net(subject.net), optimizer(subject.optimizer) {}
};

constexpr std::int64_t window = 4;

template <class Optimizer>
struct BareByHand : Loop<Optimizer> {
  using Loop<Optimizer>::Loop;
  void step(const Batch& batch) {
    const at::Tensor value = this->loss(this->net, batch);
    value.backward();
    this->optimizer.step();
    drop_gradients(this->optimizer);
  }
};

// What a hand-written loop writes down when it wants to report where it stands; the loss without reading it.
struct Books {
  std::int64_t micro_batches = 0, steps = 0, samples = 0;
  at::Tensor loss;
};
template <class Optimizer>
struct ByHand : Loop<Optimizer> {
  using Loop<Optimizer>::Loop;
  Books books;
  void step(const Batch& batch) {
    const at::Tensor value = this->loss(this->net, batch);
    value.backward();
    ++books.micro_batches;
    books.samples += batch.size();
    books.loss = value.detach();
    this->optimizer.step();
    drop_gradients(this->optimizer);
    ++books.steps;
  }
};

template <class Optimizer>
struct BareAccumulatingByHand : Loop<Optimizer> {
  using Loop<Optimizer>::Loop;
  std::int64_t seen = 0;
  void step(const Batch& batch) {
    this->loss(this->net, batch).mul(1.0 / window).backward();
    if (++seen < window) return;
    seen = 0;
    this->optimizer.step();
    drop_gradients(this->optimizer);
  }
};
template <class Optimizer>
struct AccumulatingByHand : Loop<Optimizer> {
  using Loop<Optimizer>::Loop;
  Books books;
  std::int64_t seen = 0;
  std::vector<std::pair<at::Tensor, double>> losses, last_losses;
  void step(const Batch& batch) {
    const at::Tensor value = this->loss(this->net, batch);
    value.mul(1.0 / window).backward();
    ++books.micro_batches;
    books.samples += batch.size();
    losses.emplace_back(value.detach(), static_cast<double>(batch.size()));
    if (++seen < window) return;
    seen = 0;
    this->optimizer.step();
    drop_gradients(this->optimizer);
    ++books.steps;
    std::swap(losses, last_losses);
    losses.clear();
  }
};

// Mixed precision, accumulation and the fused kernel, as short of the heap as they can be written.
struct FusedByHand : AccumulatingByHand<torch::optim::AdamW> {
  at::ScalarType dtype;
  std::vector<at::Tensor> parameters = optimizer.param_groups()[0].params(), gradients{}, first{}, second{}, counters{};

  FusedByHand(Subject<torch::optim::AdamW>& subject, at::ScalarType type)
      : AccumulatingByHand<torch::optim::AdamW>(subject), dtype(type) {
    for (const at::Tensor& parameter : parameters) {
      first.push_back(torch::zeros_like(parameter)), second.push_back(torch::zeros_like(parameter));
      counters.push_back(torch::ones({}));
    }
  }
  void step(const Batch& batch) {
    const at::Tensor value = [&] {
      const frugal::detail::AutocastRegion region(at::kCPU, dtype);
      return loss(net, batch);
    }();
    if (dtype == at::kHalf) value.to(at::kFloat).mul(256.0).mul(1.0 / window).backward();
    else value.mul(1.0 / window).backward();
    ++books.micro_batches;
    books.samples += batch.size();
    losses.emplace_back(value.detach(), static_cast<double>(batch.size()));
    if (++seen < window) return;
    seen = 0;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
      at::_fused_adamw_(parameters, gradients, first, second, {}, counters, 0.001, 0.9, 0.999, 0.01, 1e-8, false,
                        false);
      gradients.clear();
    }
    drop_gradients(optimizer);
    ++books.steps;
    std::swap(losses, last_losses);
    losses.clear();
  }
};

template <class Optimizer, class... Policies>
struct ByTrainer : Loop<Optimizer> {
  frugal::Trainer<Net, Optimizer, MeanLoss, Policies...> trainer;
  explicit ByTrainer(Subject<Optimizer>& subject, Policies... policies)
      : Loop<Optimizer>(subject), trainer(this->net, this->optimizer, this->loss, std::move(policies)...) {}
  void step(const Batch& batch) { trainer.step(batch); }
};

// What would be a mistake in the Trainer: a loss that is read back in every step.
template <class Optimizer>
struct Careless : ByHand<Optimizer> {
  using ByHand<Optimizer>::ByHand;
  double last = 0;
  void step(const Batch& batch) {
    ByHand<Optimizer>::step(batch);
    last = this->books.loss.template item<double>();
  }
};

using Sgd = torch::optim::SGD;
using AdamW = torch::optim::AdamW;
using frugal::GradAccumulator, frugal::Progress;
constexpr std::int64_t steps = 3 * window;

void compare_instructions() {
  const Batch batch;
  Subject<Sgd> plain(sgd);
  BareByHand<Sgd> sgd_bare(plain);
  ByHand<Sgd> sgd_hand(plain);
  ByTrainer<Sgd> sgd_trainer(plain);
  Careless<Sgd> sgd_careless(plain);
  Subject<AdamW> adaptive(adamw);
  BareByHand<AdamW> adamw_bare(adaptive);
  ByHand<AdamW> adamw_hand(adaptive);
  ByTrainer<AdamW> adamw_trainer(adaptive);
  Subject<AdamW> accumulating(adamw);
  BareAccumulatingByHand<AdamW> accumulating_bare(accumulating);
  AccumulatingByHand<AdamW> accumulating_hand(accumulating);
  ByTrainer<AdamW, GradAccumulator> accumulating_trainer(accumulating, GradAccumulator(window));
  const auto count = [&](const char* name, auto& loop) { overhead::count_instructions(name, loop, batch, steps); };
  for (int round = 0; round < 3; ++round) {
    count("sgd bare", sgd_bare), count("sgd hand", sgd_hand), count("sgd trainer", sgd_trainer);
    count("sgd careless", sgd_careless);
    count("adamw bare", adamw_bare), count("adamw hand", adamw_hand), count("adamw trainer", adamw_trainer);
    count("accumulating bare", accumulating_bare), count("accumulating hand", accumulating_hand);
    count("accumulating trainer", accumulating_trainer);
  }
}

// Counts operators while it lives, through LibTorch's own hook.
class Operators {
 public:
  Operators() {
    all_ = reads_ = 0;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&Operators::seen).scopes({at::RecordScope::FUNCTION}));
  }
  ~Operators() { at::removeCallback(handle_); }
  Operators(const Operators&) = delete;
  Operators& operator=(const Operators&) = delete;

  std::int64_t all() const { return all_; }
  std::int64_t reads() const { return reads_; }  // values that were read back to the host

 private:
  static std::unique_ptr<at::ObserverContext> seen(const at::RecordFunction& function) {
    ++all_;
    if (std::string_view(function.name()) == "aten::_local_scalar_dense") ++reads_;
    return nullptr;
  }
  static inline std::atomic<std::int64_t> all_, reads_;
  at::CallbackHandle handle_;
};

struct Costs {
  std::int64_t allocations, operators, reads;  // in `steps` micro-batches
};
Costs costs_of(auto& loop) {
  const Batch batch;
  const std::int64_t allocations = overhead::allocations(loop, batch, steps);
  const Operators counted;
  overhead::run(loop, batch, steps);
  return {allocations, counted.all(), counted.reads()};
}

// What a Trainer of AdamW with these policies costs.
template <class... Policies>
Costs costs_with(Policies... policies) {
  Subject<AdamW> subject(adamw);
  ByTrainer<AdamW, Policies...> loop(subject, std::move(policies)...);
  return costs_of(loop);
}
template <template <class> class Hand, class Optimizer>
Costs costs_by_hand(Optimizer (*make)(Net&)) {
  Subject<Optimizer> subject(make);
  Hand<Optimizer> loop(subject);
  return costs_of(loop);
}

void same_as_by_hand(overhead::Checks& checks, const std::string& name, const Costs& hand, const Costs& trainer) {
  checks.equal(name + ": allocations, as by hand", trainer.allocations, hand.allocations);
  checks.equal(name + ": operators, as by hand", trainer.operators, hand.operators);
  checks.equal(name + ": values read back", trainer.reads, 0);
}
void nothing_more(overhead::Checks& checks, const std::string& name, const Costs& bare, const Costs& with) {
  checks.equal(name + ": allocations, as without", with.allocations, bare.allocations);
  checks.equal(name + ": operators, as without", with.operators, bare.operators);
}
// What a policy's own operators allocate depends on LibTorch; it stays in proportion.
void little_more(overhead::Checks& checks, const std::string& name, const Costs& bare, const Costs& with,
                 std::int64_t limit, std::int64_t reads) {
  checks.at_most(name + ": more allocations per step", (with.allocations - bare.allocations) / steps, limit);
  checks.equal(name + ": values read back", with.reads, reads);
}

void check_policies(overhead::Checks& checks, const Costs& bare) {
  using namespace frugal;
  const auto more = [&](const std::string& name, const Costs& with, std::int64_t limit, std::int64_t reads) {
    little_more(checks, name, bare, with, limit, reads);
  };
  const auto same = [&](const std::string& name, const Costs& with) { nothing_more(checks, name, bare, with); };
  const auto infinity = std::numeric_limits<double>::infinity();
  same("EarlyStopper", costs_with(EarlyStopper()));
  same("Schedule", costs_with(Schedule(cosine(1000))));
  same("ReduceOnPlateau", costs_with(ReduceOnPlateau()));
  same("AmpPolicy<Fp32>", costs_with(AmpPolicy<Fp32>(at::kCPU)));
  same("AmpPolicy<>, switched off", costs_with(AmpPolicy<>(at::kCPU, AmpOptions{.precision = Precision::fp32})));
  same("GradClip, switched off", costs_with(GradClip(infinity)));
  same("Averager, switched off", costs_with(Averager({.decay = 0})));
  same("OnStep, not due", costs_with(OnStep{[](const Progress&) {}, 1000}));
  same("OnGradients", costs_with(OnGradients{[](Net&) {}}));
  same("OnStep with Readings, not due", costs_with(OnStep{[](const Progress&, const Readings&) {}, 1000}));

  const Capability able{.device = at::kCPU, .cpu_bf16 = true, .cpu_fp16 = true};
  same("Averager", costs_with(Averager()));
  same("GradClip, nothing to clip", costs_with(GradClip(1e9)));
  more("GradClip", costs_with(GradClip(1e-3)), 50, 0);  // the writing pass
  more("AmpPolicy<Bf16>", costs_with(AmpPolicy<Bf16>(at::kCPU, able)), 150, 0);
  more("AmpPolicy<Fp16>", costs_with(AmpPolicy<Fp16>(at::kCPU, able)), 200, steps);  // whether to skip
  more("OnStep, every window", costs_with(OnStep{[](const Progress&) {}, window}), 0, steps / window);
  more("AmpPolicy<Fp16> and GradAccumulator", costs_with(AmpPolicy<Fp16>(at::kCPU, able), GradAccumulator(window)), 60,
       steps / window);
  more("all but fp16",
       costs_with(AmpPolicy<Bf16>(at::kCPU, able), GradAccumulator(window), GradClip(1.0), Averager(),
                  Schedule(cosine(1000)), EarlyStopper(), OnStep{[](const Progress&) {}, 1000}),
       50, 0);
}

// All policies that act in a step together take nothing from the heap that such a loop by hand does not take.
template <class Precision>
void check_all_together(overhead::Checks& checks, const std::string& name, at::ScalarType dtype) {
  using namespace frugal;
  const Capability able{.device = at::kCPU, .cpu_bf16 = true, .cpu_fp16 = true};
  Subject<AdamW> subject(adamw);
  FusedByHand hand(subject, dtype);
  const Costs by_hand = costs_of(hand);
  const Costs with = costs_with(AmpPolicy<Precision>(at::kCPU, able, AmpOptions{.scaler = {.init_scale = 256}}),
                                GradAccumulator(window), GradClip(1e-3), FusedStep(), Schedule(cosine(1000)),
                                Averager(), EarlyStopper(), OnStep{[](const Progress&) {}, 1000});
  checks.at_most(name + ": all policies: more allocations than by hand", with.allocations - by_hand.allocations, 0);
  checks.at_most(name + ": all policies: more operators than by hand", with.operators - by_hand.operators, 0);
}

// The loss is read when somebody asks, once per window.
void check_progress(overhead::Checks& checks) {
  Subject<AdamW> subject(adamw);
  ByTrainer<AdamW, GradAccumulator> loop(subject, GradAccumulator(window));
  const Batch batch;
  overhead::run(loop, batch, 2 * window);
  const Operators counted;
  const Progress first = loop.trainer.progress(), again = loop.trainer.progress();
  checks.equal("progress(), twice in a window: values read back", counted.reads(), 1);
  overhead::run(loop, batch, window - 1);
  loop.trainer.progress();
  checks.equal("progress(), in the next window: values read back", counted.reads(), 1);
  overhead::run(loop, batch, 1);
  loop.trainer.progress();
  checks.equal("progress(), after the next window: values read back", counted.reads(), 2);
  checks.equal("progress(): the steps that it counted", first.step + again.step, 4);
}

}  // namespace

int main() {
  at::set_num_threads(1);
  torch::manual_seed(0);
  if (overhead::under_callgrind()) {
    compare_instructions();
    return 0;
  }
  overhead::Checks checks;
  std::printf("in %lld micro-batches:\n", static_cast<long long>(steps));
  const Costs bare = costs_with();
  Subject<Sgd> plain(sgd);
  ByTrainer<Sgd> of_sgd(plain);
  same_as_by_hand(checks, "SGD", costs_by_hand<ByHand>(sgd), costs_of(of_sgd));
  same_as_by_hand(checks, "AdamW", costs_by_hand<ByHand>(adamw), bare);
  same_as_by_hand(checks, "AdamW, accumulating", costs_by_hand<AccumulatingByHand>(adamw),
                  costs_with(GradAccumulator(window)));
  check_policies(checks, bare);
  check_all_together<frugal::Bf16>(checks, "bf16", at::kBFloat16);
  check_all_together<frugal::Fp16>(checks, "fp16", at::kHalf);
  check_progress(checks);
  return checks.exit_code();
}
