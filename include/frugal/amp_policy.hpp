#pragma once

#include <frugal/capability.hpp>
#include <frugal/detail/autocast.hpp>
#include <frugal/detail/gradients.hpp>
#include <frugal/detail/loss_scaling.hpp>
#include <frugal/detail/numeric_mode.hpp>
#include <frugal/detail/precision_choice.hpp>
#include <frugal/loss_scaler.hpp>
#include <frugal/policy.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_mul.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// Mixed precision for any LibTorch loop: autocast in the forward pass, loss scaling for fp16, TF32, bit-exact runs.
///
///     frugal::AmpPolicy<> amp(device);                               // Auto: what the hardware computes fastest
///     auto loss = [&] { auto guard = amp.autocast(); return loss_of(model, batch); }();
///     amp.scale(loss).backward();
///     amp.unscale(optimizer);                                        // once per window, before clipping
///     if (!amp.step(optimizer)) ++skipped;                           // fp16 overflow: nothing advanced
///     optimizer.zero_grad();
///
/// `frugal::backward` and `frugal::update` make the four lower calls for you; in a Trainer nothing is left to do.
///
/// | tag | forward | what else |
/// |---|---|---|
/// | `Auto` | bf16, fp16 or fp32, by hardware | or what the options or the environment say |
/// | `Fp32` | full precision | your own autocast is off inside the region; LibTorch's TF32 switches stay as they are |
/// | `Tf32` | float32, TF32 matrix products and convolutions | a process-wide switch |
/// | `Bf16` | autocast to bfloat16 | no scaler, no skips, nothing read back from a device |
/// | `Fp16` | autocast to float16 | loss scaling; one device read per step decides whether to skip it |
/// | `BitExact` | full precision without TF32 | deterministic kernels: two runs, the same bits; process-wide switches |
///
/// `Auto` becomes what `AmpOptions::precision` says; else bit-exact when FRUGAL_BIT_EXACT=1 is in the environment; else
/// what FRUGAL_PRECISION says (auto, fp32, tf32, bf16, fp16). Another value there is an error, an empty one counts as
/// unset.
///
/// A tag that the hardware lacks runs as fp32, and reason() says so. Process-wide switches are set while such a policy
/// lives, counted by owner and restored by the last one; construct and destroy it while no other thread computes.
/// BitExact on a GPU needs CUBLAS_WORKSPACE_CONFIG in the environment and throws when it is missing; an operator that
/// has no deterministic kernel throws when it is called. Device code not yet run on a GPU.
///
/// Several optimizers may share one policy: each is unscaled and skipped on its own, and the scale moves once for all
/// that stepped, at the next scale(). It never moves inside a window: between two optimizer steps every loss has one
/// scale. An optimizer that accumulates over the steps of another one needs a policy of its own. Switch it off at run
/// time with `AmpPolicy<>(device, {.precision = Precision::fp32})`.
namespace frugal::inline v0 {

struct Fp32 {};      ///< full precision
struct Tf32 {};      ///< float32 with TF32 matrix products and convolutions
struct Bf16 {};      ///< autocast to bfloat16
struct Fp16 {};      ///< autocast to float16 with loss scaling
struct BitExact {};  ///< float32, the same bits in every run
struct Auto {};      ///< decided when the policy is constructed

/// Options of AmpPolicy.
struct AmpOptions {
  LossScalerOptions scaler = {};            ///< used when the precision is fp16
  std::optional<Precision> precision = {};  ///< what Auto becomes; wins over the environment
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

/// Mixed precision; see the top of this header. Movable; holds no reference to a model or an optimizer.
template <class Tag = Auto>
class AmpPolicy {
  static constexpr bool is_auto = std::is_same_v<Tag, Auto>;
  static_assert(is_auto || detail::precision_of_tag<Tag>.has_value(),
                "AmpPolicy: unknown tag. Use Auto, Fp32, Tf32, Bf16, Fp16 or BitExact.");

 public:
  static constexpr Role role = Role::precision;
  /// Whether step() can return false.
  static constexpr bool can_skip = is_auto || std::is_same_v<Tag, Fp16>;

  /// For the hardware that is here. Throws when it cannot be asked (see Capability::of) although the choice depends on
  /// it, on an unknown value in FRUGAL_PRECISION or FRUGAL_BIT_EXACT (Auto only), and on options that contradict the
  /// tag.
  explicit AmpPolicy(at::Device device, AmpOptions options = {})
      : AmpPolicy(device, needs_hardware(options) ? Capability::of(device) : Capability{.device = device.type()},
                  options) {}

  /// For hardware as a value: tests, planning.
  template <std::same_as<Capability> Value>  // a template, since braces could be either for clang 16
  AmpPolicy(at::Device device, Value capability) : AmpPolicy(device, capability, AmpOptions{}) {}
  AmpPolicy(at::Device device, Capability capability, AmpOptions options)
      : device_(device.type()),
        choice_(detail::choose_precision(in_code(options), capability)),
        scaling_(options.scaler) {
    TORCH_CHECK(capability.device == device.type(), "AmpPolicy: the device is ", device,
                " but the Capability describes a ", capability.device, " device. Pass the two for the same kind.");
    if constexpr (sets_switches) {
      if (precision() == Precision::bit_exact && device.is_cuda()) detail::check_cublas_workspace();
      if (precision() == Precision::bit_exact) share_ = detail::NumericShare(detail::NumericMode::bit_exact);
      if (precision() == Precision::tf32) share_ = detail::NumericShare(detail::NumericMode::tf32);
    }
  }

  /// The forward pass and the loss run while this guard lives; backward needs none. Every exit, exceptions included,
  /// restores this thread's autocast state. Neither copyable nor movable: `auto guard = amp.autocast();`
  [[nodiscard]] auto autocast() {
    std::optional<at::ScalarType> dtype;
    if (precision() == Precision::bf16) dtype = at::kBFloat16;
    if (precision() == Precision::fp16) dtype = at::kHalf;
    return detail::AutocastRegion(device_, dtype);
  }

  /// The loss to backpropagate: `loss` itself without a scaler, else float32 (65536 overflows an fp16 loss) times the
  /// scale. Call it for every micro-batch.
  at::Tensor scale(const at::Tensor& loss) {
    if constexpr (can_skip)
      if (scales()) {
        const double scale = scaling_.begin_loss();
        return (loss.scalar_type() == at::kDouble ? loss : loss.to(at::kFloat)).mul(scale);
      }
    return loss;
  }

  /// Makes the gradients the true ones: divides by the scale, multiplies by `factor` (GradAccumulator's) and looks for
  /// overflow in one pass. Once per window and optimizer, before clipping; a second call throws. Sparse gradients are
  /// coalesced. Without a scaler and with factor 1 it does nothing.
  void unscale(auto& optimizer, double factor = 1.0) {
    if constexpr (can_skip)
      if (scales()) return scaling_.unscale(optimizer, gradients_, factor);
    if (factor == 1.0) return;
    gradients_.each_kind(optimizer, [&](std::vector<at::Tensor>& list) { at::_foreach_mul_(list, factor); });
  }

  /// Steps the optimizer, or returns false on overflow: nothing advanced, the scale backs off. Unscales first if nobody
  /// has. One device read with a scaler, none without. Throws after `max_consecutive_skips` overflows in a row.
  bool step(auto& optimizer) {
    constexpr bool steps = requires { optimizer.step(); };
    static_assert(
        steps, "AmpPolicy: this optimizer needs a closure (LBFGS). Use one that steps without, or step it yourself.");
    if constexpr (steps) {
      if constexpr (can_skip)
        if (scales() && scaling_.overflowed(optimizer, gradients_)) return false;
      optimizer.step();
      at::autocast::clear_cache();  // casts of the old weights
    }
    return true;
  }

  /// Forgets a window that was unscaled and will not be stepped; update() calls it when something throws in between.
  void abandon(auto& optimizer) {
    if constexpr (can_skip) scaling_.abandon(optimizer);
  }

  /// What was chosen.
  Precision precision() const { return choice_.precision; }
  /// What was chosen and why, in one sentence.
  std::string reason() const { return choice_.reason; }
  /// The scale that the next scale() uses; 1 without a scaler.
  double scale_factor() const {
    if constexpr (can_skip)
      if (scales()) return scaling_.next().scale();
    return 1.0;
  }
  /// Windows that overflowed and were skipped, since the start of the run.
  std::int64_t skipped() const {
    if constexpr (can_skip)
      if (scales()) return scaling_.next().skipped();
    return 0;
  }

  /// `scale` and `skipped`, where there is a scaler.
  void readings(auto& out) const {
    if constexpr (can_skip)
      if (scales()) {
        out.write("scale", scale_factor());
        out.write("skipped", static_cast<double>(skipped()));
      }
  }
  /// A new run: the scale and the counts start anew, the precision stays.
  void reset() {
    if constexpr (can_skip) scaling_.reset();
  }
  void save(auto& out) const {
    out.write("precision", std::string(name_of(precision())));
    if constexpr (can_skip)
      if (scales()) scaling_.next().save(out);
  }
  /// Continues in this policy's own precision, with a warning when the state comes from another one.
  void load(auto& in) {
    std::string saved;
    in.read("precision", saved);
    if (saved != name_of(precision())) {
      TORCH_WARN("AmpPolicy: the saved run was in ", saved, ", this one continues in ", name_of(precision()), ".");
    }
    if constexpr (can_skip)
      if (scales() && in.has("scale")) scaling_.load(in);
  }

 private:
  static constexpr bool sets_switches = is_auto || std::is_same_v<Tag, Tf32> || std::is_same_v<Tag, BitExact>;

  static std::optional<Precision> in_code(const AmpOptions& options) {
    constexpr std::optional<Precision> tag = detail::precision_of_tag<Tag>;
    TORCH_CHECK(!tag || !options.precision || *tag == *options.precision, "AmpPolicy: the tag says ", name_of(*tag),
                ", AmpOptions::precision says ", name_of(*options.precision), ". Use Auto with that option.");
    return tag ? tag : options.precision;
  }
  // fp32 and bit-exact run anywhere, also on devices that cannot be asked.
  static bool needs_hardware(const AmpOptions& options) {
    const std::optional<Precision> wanted = in_code(options);
    return wanted != Precision::fp32 && wanted != Precision::bit_exact;
  }
  bool scales() const { return choice_.precision == Precision::fp16; }

  at::DeviceType device_;
  detail::PrecisionChoice choice_;
  detail::Gradients gradients_;
  [[no_unique_address]] std::conditional_t<can_skip, detail::LossScaling, detail::Absent<0>> scaling_;
  [[no_unique_address]] std::conditional_t<sets_switches, detail::NumericShare, detail::Absent<1>> share_{};
};

}  // namespace frugal::inline v0
