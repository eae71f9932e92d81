#pragma once

#include <frugal/capability.hpp>
#include <frugal/loss_scaler.hpp>

#include <optional>
#include <type_traits>

/// What AmpPolicy can be told: its tags and its options.
///
///     frugal::AmpPolicy<> fp16(device, {.scaler = {.init_scale = 1024},            // in this order, any of them
///                                       .precision = frugal::Precision::fp16,
///                                       .attention = frugal::Attention::fp32,
///                                       .weight_casts = frugal::WeightCasts::per_step,
///                                       .skip_decision = frugal::SkipDecision::lagged});
namespace frugal::inline v0 {

struct Fp32 {};      ///< full precision
struct Tf32 {};      ///< float32 with TF32 matrix products and convolutions
struct Bf16 {};      ///< autocast to bfloat16
struct Fp16 {};      ///< autocast to float16 with loss scaling
struct BitExact {};  ///< float32, the same bits in every run
struct Auto {};      ///< decided when the policy is constructed

/// Where scaled_dot_product_attention is computed in an autocast region. `autocast`: as LibTorch does, in the low
/// precision. `fp32`: in float32; on a CPU the backward pass of bf16 attention is several times slower than that.
enum class Attention { autocast, fp32 };

/// How often a weight is cast. `per_forward`: as LibTorch does, at its first use in each region, and at every use in an
/// nn::Linear. `per_step`: once between two optimizer steps, however many micro-batches there are, for nn::Linear,
/// convolutions and torch::linear; gradients are the same, but for a weight that is used twice before a backward pass: its two
/// gradients are summed in the low precision. (A `weight.t()` of yours hears nothing of its own gradient, unless it had a hook
/// or retain_grad() before the product.) On a CPU the gradients of such weights are added to what is there in one pass over
/// memory, where LibTorch casts them first.
///
/// A kept cast ends with AmpPolicy::step(), which update() and the Trainer call; with zero_grad(), where that drops the
/// gradients, as LibTorch's does unless told otherwise; and when its weight was written through LibTorch. Who steps past
/// the policy, keeps the gradients' memory and writes the weights through `.data()`, as torch::optim::SGD does, or through
/// a pointer, is found out on a CPU alone, by a sample of every weight: call `amp.step(optimizer)`.
enum class WeightCasts { per_forward, per_step };

/// When fp16's update learns whether its window overflowed. Either way the device skips a window that did, and nothing of it
/// is kept. `lagged` acts in update() and the Trainer with a FusedStep, where no policy has on_gradients; elsewhere it is
/// `exact`. What it asks of you: a window's answer is open until the next update, and meanwhile
///
///  - StepResult and AmpPolicy::step() have said `applied` and true;
///  - a Trainer's progress, rates and averages are one window behind. It books the window at the next update, and before it
///    when asked: by progress(), get() of the Averager, a check, a save, restart(), an on_step that is due;
///  - in a loop of your own settle() asks (update.hpp has the recipe);
///  - StateGuard, CheckpointManager, BatchSizeProber, frugal::calibrate() and steps by hand (FusedStep, AmpPolicy) refuse, and
///    Averager for a model that has the optimizer's first parameter;
///  - who writes weights or states, calls the optimizer's own step() or destroys the Trainer should ask first: nobody can
///    refuse there, and what a skipped step counted stays counted;
///  - on_skip is called inside the next update, and what it throws drops that window.
///
/// Optimizers are told apart by their first parameter, which must stay.
enum class SkipDecision {
  exact,  ///< in the update: one device read per window, for which the host waits
  lagged  ///< at the next one, when the answer has long arrived: the host never waits
};

/// Options of AmpPolicy. `attention` and `weight_casts` mean something where the precision is bf16 or fp16. Anything but
/// their defaults registers kernels with LibTorch's dispatcher while such a policy lives: they act in the regions of
/// these policies alone, but are the process's, so construct and destroy such a policy while no other thread computes.
/// `calibrate` tries both and decides both anew, whatever they are here (calibration.hpp).
struct AmpOptions {
  LossScalerOptions scaler = {};                        ///< used when the precision is fp16 (loss_scaler.hpp)
  std::optional<Precision> precision = {};              ///< what Auto becomes; wins over the environment
  Attention attention = Attention::autocast;            ///< see Attention; calibrate() decides it anew
  WeightCasts weight_casts = WeightCasts::per_forward;  ///< see WeightCasts; a copy of the weights in low precision
                                                        ///< lives from their first use to the step; as above
  SkipDecision skip_decision = SkipDecision::exact;     ///< see SkipDecision; means something in fp16
};

namespace detail {

template <class Tag>
constexpr std::optional<Precision> precision_of_tag =
    std::is_same_v<Tag, Fp32>       ? std::optional(Precision::fp32)
    : std::is_same_v<Tag, Tf32>     ? std::optional(Precision::tf32)
    : std::is_same_v<Tag, Bf16>     ? std::optional(Precision::bf16)
    : std::is_same_v<Tag, Fp16>     ? std::optional(Precision::fp16)
    : std::is_same_v<Tag, BitExact> ? std::optional(Precision::bit_exact)
                                    : std::nullopt;

// What stands where a tag rules a member out.
template <int>
struct Absent {
  explicit Absent(auto&&...) {}
};

}  // namespace detail

}  // namespace frugal::inline v0
