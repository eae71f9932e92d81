#pragma once

#include <frugal/capability.hpp>
#include <frugal/detail/precision_choice.hpp>
#include <frugal/loss_scaler.hpp>

#include <optional>
#include <type_traits>

namespace frugal::inline v0 {

struct Fp32 {};      ///< full precision
struct Tf32 {};      ///< float32 with TF32 matrix products and convolutions
struct Bf16 {};      ///< autocast to bfloat16
struct Fp16 {};      ///< autocast to float16 with loss scaling
struct BitExact {};  ///< float32, the same bits in every run
struct Auto {};      ///< decided when the policy is constructed

/// When fp16's step() learns whether the window overflowed. Either way the device skips a window that did, and nothing of it
/// is kept.
enum class SkipDecision {
  exact,  ///< in step(): one device read per window, for which the host waits
  lagged,  ///< at the next update, when the answer has long arrived: the host never waits. Until then step() has said true,
  ///< and frugal::settle() asks. With FusedStep in update() and the Trainer, where nobody watches gradients; elsewhere
  ///< as exact
};

/// Options of AmpPolicy. `attention` and `weight_casts` mean something where the precision is bf16 or fp16. Anything but
/// their defaults registers kernels with LibTorch's dispatcher while such a policy lives: they act in the regions of
/// these policies alone, but are the process's, so construct and destroy such a policy while no other thread computes.
/// `calibrate` tries both (calibration.hpp).
struct AmpOptions {
  LossScalerOptions scaler = {};                        ///< used when the precision is fp16
  std::optional<Precision> precision = {};              ///< what Auto becomes; wins over the environment
  Attention attention = Attention::autocast;            ///< see Attention
  WeightCasts weight_casts = WeightCasts::per_forward;  ///< see WeightCasts; a copy of the weights in low precision
                                                        ///< lives from their first use to the step
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
