#pragma once

#include <frugal/amp_options.hpp>
#include <frugal/capability.hpp>
#include <frugal/detail/autocast.hpp>
#include <frugal/detail/device_kernels.hpp>
#include <frugal/detail/gradients.hpp>
#include <frugal/detail/loss_scaling.hpp>
#include <frugal/detail/numeric_mode.hpp>
#include <frugal/detail/open_answers.hpp>
#include <frugal/detail/pending.hpp>
#include <frugal/detail/precision_choice.hpp>
#include <frugal/detail/provided_extras.hpp>
#include <frugal/loss_scaler.hpp>
#include <frugal/policy.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

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
/// | `Fp16` | autocast to float16 | loss scaling; one device read per step decides whether to skip it (or none: SkipDecision) |
/// | `BitExact` | full precision without TF32 | deterministic kernels: two runs, the same bits; process-wide switches |
///
/// AmpOptions: amp_options.hpp. A validation runs in full precision unless it opens a region itself.
///
/// `Auto` becomes what `AmpOptions::precision` says; else bit-exact when FRUGAL_BIT_EXACT=1 is in the environment; else
/// what FRUGAL_PRECISION says (auto, fp32, tf32, bf16, fp16). Another value there is an error, an empty one is none.
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

/// Mixed precision; see the top of this header. Movable; holds no reference to a model or an optimizer, but casts of weights
/// until the next step. For one thread at a time.
template <class Tag = Auto>
class AmpPolicy {
  static constexpr bool is_auto = std::is_same_v<Tag, Auto>;
  static_assert(is_auto || detail::precision_of_tag<Tag>.has_value(),
                "AmpPolicy: unknown tag. Use Auto, Fp32, Tf32, Bf16, Fp16 or BitExact.");

 public:
  static constexpr Role role = Role::precision;
  using Defers = AmpPolicy;  // detail/slots.hpp
  /// Whether step() can return false.
  static constexpr bool can_skip = is_auto || std::is_same_v<Tag, Fp16>;

  /// For the hardware that is here. Throws when it cannot be asked (see Capability::of) although the choice depends on
  /// it or this LibTorch has no kernels for it, on an unknown value in FRUGAL_PRECISION or FRUGAL_BIT_EXACT (Auto only),
  /// and on options that contradict the tag.
  explicit AmpPolicy(at::Device device, AmpOptions options = {})
      : AmpPolicy(device,
                  needs_hardware(options) ? detail::with_kernels(device, Capability::of(device))
                                          : Capability{.device = device.type()},
                  options) {}

  /// For hardware as a value: tests, planning.
  template <std::same_as<Capability> Value>  // a template, since braces could be either for clang 16
  AmpPolicy(at::Device device, Value capability) : AmpPolicy(device, capability, AmpOptions{}) {}
  AmpPolicy(at::Device device, Capability capability, AmpOptions options)
      : device_(device), chosen_(in_code(options), capability), scaling_(options.scaler, options.skip_decision) {
    TORCH_CHECK(capability.device == device.type(), "AmpPolicy: the device is ", device,
                " but the Capability describes a ", capability.device, " device. Pass the two for the same kind.");
    if constexpr (sets_switches) {
      if (precision() == Precision::bit_exact && device.is_cuda()) detail::check_cublas_workspace();
      if (precision() == Precision::bit_exact) share_ = detail::NumericShare(detail::NumericMode::bit_exact);
      if (precision() == Precision::tf32) share_ = detail::NumericShare(detail::NumericMode::tf32);
    }
    if (detail::autocasts(precision())) chosen_.set(chosen_.now().joined_with(options), detail::Chosen::by_rule);
    extras_.provide(chosen_.now(), device_.type());
  }

  /// The forward pass and the loss run while this guard lives; backward needs none. Every exit, exceptions included,
  /// restores this thread's autocast state. Neither copyable nor movable: `auto guard = amp.autocast();`
  [[nodiscard]] auto autocast() {
    std::optional<at::ScalarType> dtype;
    if (precision() == Precision::bf16) dtype = at::kBFloat16;
    if (precision() == Precision::fp16) dtype = at::kHalf;
    return detail::AutocastRegion(device_.type(), dtype, extras_.get());
  }

  /// The loss to backpropagate: `loss` itself without a scaler, else float32 (65536 overflows an fp16 loss) times the
  /// scale. Call it for every micro-batch.
  at::Tensor scale(const at::Tensor& loss) {
    if constexpr (can_skip)
      if (scales()) return scaling_.scaled(loss.scalar_type() == at::kDouble ? loss : loss.to(at::kFloat));
    return loss;
  }

  /// Makes the gradients the true ones: divides by the scale, multiplies by `factor` (GradAccumulator's) and looks for
  /// overflow in one pass. Once per window and optimizer, before clipping; a second call throws. Sparse gradients are
  /// coalesced. Without a scaler and with factor 1 it does nothing. In update() and the Trainer it may leave all that to the
  /// step (FusedStep).
  void unscale(auto& optimizer, double factor = 1.0) {
    if constexpr (can_skip)
      if (scales()) return scaling_.unscale(optimizer, gradients_, factor);
    if constexpr (detail::Deferring<std::remove_reference_t<decltype(optimizer)>>) optimizer.pending.factor *= factor;
    else detail::PendingScale{.factor = factor}.settle(optimizer, gradients_);
  }

  /// Steps the optimizer, or returns false on overflow: nothing advanced, the scale backs off. Unscales first if nobody
  /// has. One device read with a scaler, none without. Throws after `max_consecutive_skips` overflows in a row. Lagged, which
  /// only update() and the Trainer make it, it says true, throws one window later, and unanswered() holds until settle().
  bool step(auto& optimizer) {
    constexpr bool steps = requires { optimizer.step(); };
    static_assert(
        steps, "AmpPolicy: this optimizer needs a closure (LBFGS). Use one that steps without, or step it yourself.");
    if constexpr (steps) {
      if constexpr (can_skip)
        if (scales() && scaling_.overflowed(optimizer, gradients_)) return false;
      optimizer.step();
      detail::forget_casts();
      extras_.stepped();
    }
    return true;
  }

  /// Lagged: whether nobody knows yet if the last step, of this optimizer or of any, was skipped.
  bool unanswered(auto& optimizer) {
    if constexpr (can_skip) return scales() && scaling_.unanswered(optimizer);
    else return false;
  }
  bool unanswered() const {
    if constexpr (can_skip) return scales() && scaling_.unanswered();
    else return false;
  }
  /// Lagged, for settle() (update.hpp): as step(), for the last step, but what throws after too many skips is conclude().
  bool answer(auto& optimizer) {
    if constexpr (can_skip) return !scales() || !scaling_.answer(optimizer);
    else return true;
  }
  void conclude() {
    if constexpr (can_skip) scaling_.move();
  }

  /// Forgets a window that was unscaled and will not be stepped; update() calls it when something throws in between.
  void abandon(auto& optimizer) {
    if constexpr (can_skip) scaling_.abandon(optimizer);
  }

  /// For calibrate(): what this policy may be, is, and becomes between windows; what its regions saw; its device.
  const detail::ChosenPrecision& chosen() const { return chosen_; }
  void become(detail::PrecisionChoice choice, detail::Chosen how) {
    chosen_.set(std::move(choice), how);
    extras_.provide(chosen_.now(), device_.type());
    if constexpr (can_skip) scaling_.forget_windows();
  }
  const detail::AutocastExtras* extras() const { return extras_.get(); }
  at::Device device() const { return device_; }

  /// What was chosen.
  Precision precision() const { return chosen_.now().precision; }
  /// What was chosen and why, with the options in force; after calibrate() with its figures.
  std::string reason() const {
    if constexpr (can_skip) return chosen_.now().reason + (scales() ? scaling_.note() : "");
    else return chosen_.now().reason;
  }
  /// The scale that the next scale() uses; 1 without a scaler. Lagged: reads what the last step was, as skipped() does.
  double scale_factor() const {
    if constexpr (can_skip)
      if (scales()) return scaling_.next().scale();
    return 1.0;
  }
  /// Windows that overflowed and were skipped, since the start of the run.
  std::int64_t skipped() const {
    if constexpr (can_skip) return scales() ? scaling_.next().skipped() : 0;
    else return 0;
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
    detail::expect_none_open("AmpPolicy: save()", unanswered());
    chosen_.save(out);
    if constexpr (can_skip)
      if (scales()) scaling_.next().save(out);
  }
  /// Continues in what calibrate() had chosen for the saved run, where that is possible; else in this policy's own
  /// precision, with a warning when the saved one was another.
  void load(auto& in) {
    chosen_.load(in);
    extras_.provide(chosen_.now(), device_.type());
    if constexpr (can_skip) scaling_.load(in, scales());
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
  bool scales() const { return precision() == Precision::fp16; }

  at::Device device_;
  detail::ChosenPrecision chosen_;
  detail::Gradients gradients_;
  detail::ProvidedExtras extras_;
  [[no_unique_address]] std::conditional_t<can_skip, detail::LossScaling, detail::Absent<0>> scaling_;
  [[no_unique_address]] std::conditional_t<sets_switches, detail::NumericShare, detail::Absent<1>> share_{};
};

}  // namespace frugal::inline v0
