#pragma once

#include <frugal/amp_options.hpp>
#include <frugal/capability.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Which precision a policy runs in, and why.
namespace frugal::inline v0::detail {

constexpr bool autocasts(Precision precision) { return precision == Precision::bf16 || precision == Precision::fp16; }

struct PrecisionChoice {
  Precision precision;
  std::string reason;  // one sentence
  Attention attention = Attention::autocast;
  WeightCasts weight_casts = WeightCasts::per_forward;

  // The same way to compute, whatever the reason.
  bool same_as(const PrecisionChoice& other) const {
    return precision == other.precision && attention == other.attention && weight_casts == other.weight_casts;
  }
  // With what the options add to autocast.
  PrecisionChoice joined_with(const AmpOptions& options) const {
    PrecisionChoice choice = *this;
    choice.attention = options.attention, choice.weight_casts = options.weight_casts;
    if (const std::string words = choice.more(); !words.empty()) choice.reason += " With " + words + ".";
    return choice;
  }
  // "bf16, attention in fp32, weights cast once per step", and that without the precision
  std::string text() const {
    const std::string words = more();
    return std::string(name_of(precision)) + (words.empty() ? "" : ", ") + words;
  }
  std::string more() const {
    std::string words = attention == Attention::fp32 ? "attention in fp32" : "";
    if (weight_casts == WeightCasts::per_step)
      words += (words.empty() ? "" : ", ") + std::string("weights cast once per step");
    return words;
  }
};

// `wanted`, or full precision when the hardware lacks it. `why`: "asked for in code".
inline PrecisionChoice allowed(Precision wanted, std::string_view why, const Capability& capability) {
  std::string name(name_of(wanted));
  if (std::string lack = capability.missing(wanted); !lack.empty())
    return {Precision::fp32, "fp32, because " + name + " was " + std::string(why) + " but " + lack + "."};
  if (wanted == Precision::fp16) name += " with loss scaling";
  return {wanted, name + ", " + std::string(why) + "."};
}

inline std::string environment(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr ? value : "";  // an empty variable is an unset one
}

// What the environment asks for; an unknown value is an error, for a run must never silently be another one.
inline std::optional<std::pair<Precision, std::string_view>> asked_by_environment() {
  const std::string exact = environment("FRUGAL_BIT_EXACT"), name = environment("FRUGAL_PRECISION");
  TORCH_CHECK(exact.empty() || exact == "0" || exact == "1", "AmpPolicy: FRUGAL_BIT_EXACT is '", exact,
              "'. Set it to 1 or 0.");
  std::optional<std::pair<Precision, std::string_view>> asked;
  for (Precision precision : {Precision::fp32, Precision::tf32, Precision::bf16, Precision::fp16})
    if (name == name_of(precision)) asked.emplace(precision, "asked for by FRUGAL_PRECISION");
  TORCH_CHECK(asked || name.empty() || name == "auto", "AmpPolicy: FRUGAL_PRECISION is '", name,
              "'. Set it to auto, fp32, tf32, bf16 or fp16.");
  if (exact == "1") asked.emplace(Precision::bit_exact, "asked for by FRUGAL_BIT_EXACT");
  return asked;
}

// `in_code` is what the tag or the options say; without it the environment decides, then the hardware.
inline PrecisionChoice choose_precision(std::optional<Precision> in_code, const Capability& capability) {
  if (in_code) return allowed(*in_code, "asked for in code", capability);
  if (const auto asked = asked_by_environment()) return allowed(asked->first, asked->second, capability);
  if (capability.device == at::kCPU)
    return capability.best() == Precision::bf16
               ? allowed(Precision::bf16, "which this CPU computes in hardware", capability)
               : PrecisionChoice{Precision::fp32, "fp32, because " + capability.missing(Precision::bf16) + "."};
  const std::string sm =
      "compute capability " + std::to_string(capability.major) + "." + std::to_string(capability.minor);
  if (capability.best() == Precision::fp32)
    return {Precision::fp32, "fp32, because " + capability.missing(Precision::fp16) + "."};
  return allowed(capability.best(), "the fastest of " + sm, capability);
}

// What was measured goes into checkpoints, and a resumed run keeps it.
enum class Chosen { by_rule, by_measuring };

// What a policy runs in, and what it may run in instead.
class ChosenPrecision {
 public:
  ChosenPrecision(std::optional<Precision> in_code, const Capability& capability)
      : choice_(choose_precision(in_code, capability)), open_(!in_code && !asked_by_environment()) {}

  const PrecisionChoice& now() const { return choice_; }
  void set(PrecisionChoice choice, Chosen how) {
    choice_ = std::move(choice), how_ = how;
    put_by_.reset();
  }
  Chosen how() const { return how_; }

  // The simplest first: full precision where nobody asked for another one, then autocast and what it can be joined with.
  std::vector<PrecisionChoice> candidates() const {
    std::vector<PrecisionChoice> all;
    if (open_ || !autocasts(fastest_)) all.push_back({.precision = open_ ? Precision::fp32 : fastest_, .reason = {}});
    if (autocasts(fastest_))
      for (const auto casts : {WeightCasts::per_forward, WeightCasts::per_step})
        for (const auto attention : {Attention::autocast, Attention::fp32})
          all.push_back({.precision = fastest_, .reason = {}, .attention = attention, .weight_casts = casts});
    return all;
  }

  void save(auto& out) const {
    out.write("precision", std::string(name_of(choice_.precision)));
    const PrecisionChoice* const measured = how_ == Chosen::by_measuring ? &choice_ : put_by_ ? &*put_by_ : nullptr;
    if (!measured) return;
    out.write("measured", measured->reason);
    out.write("measured_precision", std::string(name_of(measured->precision)));
    out.write("attention_in_fp32", std::int64_t{measured->attention == Attention::fp32});
    out.write("casts_per_step", std::int64_t{measured->weight_casts == WeightCasts::per_step});
  }
  // Takes up what was measured in the saved run, if that is possible here; else goes on as it is and puts that by, for
  // whoever continues from the next checkpoint. Warns when the saved run was in another precision.
  void load(auto& in) {
    std::string precision;
    in.read("precision", precision);
    put_by_ = in.has("measured") ? measured_in(in, precision) : std::nullopt;
    if (put_by_ && std::ranges::any_of(candidates(), [&](const auto& way) { return way.same_as(*put_by_); }))
      return set(*std::exchange(put_by_, std::nullopt), Chosen::by_measuring);
    if (precision != name_of(choice_.precision))
      TORCH_WARN("AmpPolicy: the saved run was in ", precision, ". This one continues in ", choice_.reason);
  }

 private:
  static std::optional<PrecisionChoice> measured_in(auto& in, std::string precision) {
    std::string reason;
    std::int64_t attention = 0, casts = 0;
    in.read("measured", reason);
    if (in.has("measured_precision")) in.read("measured_precision", precision);
    in.read("attention_in_fp32", attention);
    in.read("casts_per_step", casts);
    for (const Precision known :
         {Precision::fp32, Precision::tf32, Precision::bf16, Precision::fp16, Precision::bit_exact})
      if (precision == name_of(known))
        return PrecisionChoice{known, reason, attention != 0 ? Attention::fp32 : Attention::autocast,
                               casts != 0 ? WeightCasts::per_step : WeightCasts::per_forward};
    return std::nullopt;
  }

  PrecisionChoice choice_;
  Precision fastest_ = choice_.precision;  // of this hardware, or what was asked for
  bool open_;                              // nobody asked
  Chosen how_ = Chosen::by_rule;
  std::optional<PrecisionChoice> put_by_;  // measured in the saved run, and not possible in this one
};

// Equal bits on a GPU need a fixed cuBLAS workspace, which cuBLAS reads once, before the program can set it.
inline void check_cublas_workspace() {
  const std::string workspace = environment("CUBLAS_WORKSPACE_CONFIG");
  TORCH_CHECK(workspace == ":4096:8" || workspace == ":16:8",
              "AmpPolicy: bit-exact on a GPU needs a fixed cuBLAS "
              "workspace, but CUBLAS_WORKSPACE_CONFIG is '",
              workspace,
              "'. Start the program with CUBLAS_WORKSPACE_CONFIG=:4096:8 (or :16:8, slower with less memory).");
}

}  // namespace frugal::inline v0::detail
