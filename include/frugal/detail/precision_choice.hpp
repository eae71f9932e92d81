#pragma once

#include <frugal/capability.hpp>

#include <c10/util/Exception.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

// Which precision a policy runs in, and why.
namespace frugal::inline v0::detail {

struct PrecisionChoice {
  Precision precision;
  std::string reason;  // one sentence
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
