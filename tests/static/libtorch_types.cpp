// LibTorch's own models and optimizers satisfy what the policies ask for. Passes if it compiles.
#include <frugal/amp_policy.hpp>
#include <frugal/averager.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/grad_clip.hpp>
#include <frugal/policy.hpp>
#include <frugal/schedule.hpp>
#include <frugal/trainer.hpp>

#include <torch/torch.h>

#include <memory>
#include <type_traits>
#include <vector>

namespace {

using namespace frugal;

template <class Optimizer>
constexpr bool fits_optimizer =
    PrecisionPolicy<AmpPolicy<Auto>, Optimizer> && PrecisionPolicy<AmpPolicy<Fp32>, Optimizer> &&
    PrecisionPolicy<AmpPolicy<Tf32>, Optimizer> && PrecisionPolicy<AmpPolicy<Bf16>, Optimizer> &&
    PrecisionPolicy<AmpPolicy<Fp16>, Optimizer> && PrecisionPolicy<AmpPolicy<BitExact>, Optimizer> &&
    ClippingPolicy<GradClip, Optimizer> && SchedulePolicy<Schedule, Optimizer> &&
    SchedulePolicy<ReduceOnPlateau, Optimizer>;
static_assert(fits_optimizer<torch::optim::SGD> && fits_optimizer<torch::optim::Adam>);
static_assert(fits_optimizer<torch::optim::AdamW> && fits_optimizer<torch::optim::Adagrad>);
static_assert(fits_optimizer<torch::optim::RMSprop>);
static_assert(AccumulationPolicy<GradAccumulator, at::Tensor> && AccumulationPolicy<GradAccumulator, const at::Tensor>);

// A module, a holder and a shared_ptr are models.
struct NetImpl : torch::nn::Module {};
TORCH_MODULE(Net);
template <class Model>
constexpr bool is_model =
    AveragingPolicy<Averager, Model> && std::is_same_v<frugal::detail::Tensor<Model, torch::optim::SGD>, at::Tensor>;
static_assert(is_model<NetImpl> && is_model<Net> && is_model<std::shared_ptr<NetImpl>>);
static_assert(is_model<torch::nn::Sequential> && is_model<torch::nn::Linear>);
// Of a struct of modules the optimizer shows the weights.
struct Pair { Net first, second; };
static_assert(std::is_same_v<frugal::detail::Tensor<Pair, torch::optim::SGD>, at::Tensor>);

struct Loss {
  at::Tensor operator()(Net&, const at::Tensor& batch) const { return batch; }
};
template <class Optimizer>
constexpr bool needs_closure = frugal::detail::Composition<Net, Optimizer>::needs_closure;
static_assert(needs_closure<torch::optim::LBFGS>);
static_assert(!needs_closure<torch::optim::SGD> && !needs_closure<torch::optim::Adam>);
static_assert(!needs_closure<torch::optim::AdamW> && !needs_closure<torch::optim::Adagrad>);
static_assert(!needs_closure<torch::optim::RMSprop>);

// Two references, where the run stands, the last loss and whether it was read, two flags of the loop: nothing else.
struct Bare {
  Net& model;
  torch::optim::SGD& optimizer;
  Progress progress;
  struct {
    at::Tensor last;
    bool unread;
  } loss;
  bool begun, moved;
};
static_assert(sizeof(Trainer<Net, torch::optim::SGD, Loss>) == sizeof(Bare));

// Tags that cannot overflow are known not to when the loop is compiled.
static_assert(AmpPolicy<Fp16>::can_skip && AmpPolicy<Auto>::can_skip);
static_assert(!AmpPolicy<Fp32>::can_skip && !AmpPolicy<Tf32>::can_skip && !AmpPolicy<Bf16>::can_skip);
static_assert(!AmpPolicy<BitExact>::can_skip);

static_assert(AmpPolicy<>::role == Role::precision && GradClip::role == Role::clipping &&
              Averager::role == Role::averaging);
static_assert(Stateful<AmpPolicy<Fp16>> && Stateful<AmpPolicy<Fp32>> && Stateful<Averager>);

template <class Type>
constexpr bool movable = std::is_move_constructible_v<Type> && std::is_move_assignable_v<Type>;
static_assert(movable<AmpPolicy<Auto>> && movable<AmpPolicy<Fp16>> && movable<AmpPolicy<Bf16>> &&
              movable<AmpPolicy<BitExact>>);
static_assert(movable<GradClip> && movable<Averager> && movable<LossScaler>);
static_assert(std::is_move_constructible_v<Trainer<Net, torch::optim::SGD, Loss, AmpPolicy<>, GradClip, Averager>>);

// What LibTorch's data loaders yield can be counted and weighed.
using Example = torch::data::Example<>;
static_assert(frugal::detail::weighable<at::Tensor> && frugal::detail::weighable<Example> &&
              frugal::detail::weighable<std::vector<Example>>);
static_assert(frugal::detail::weighable<std::pair<at::Tensor, at::Tensor>> &&
              frugal::detail::weighable<std::vector<at::Tensor>>);
static_assert(!frugal::detail::weighable<int>);

}  // namespace
