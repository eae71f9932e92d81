#pragma once

#include <ATen/Context.h>

#include <utility>

// LibTorch's process-wide numeric switches, for policies that change them: counted by owner, restored by the last one.
namespace frugal::inline v0::detail {

// The switches behind TF32. LibTorch has an old interface (one switch for cuBLAS, one for cuDNN) and a new one (a
// precision per operator, which may inherit), and its readers throw when the two disagree. So both are always set
// together.
class Float32Switches {
 public:
  // Notes the present state and sets TF32 on or off.
  explicit Float32Switches(bool tf32) {
    auto& context = at::globalContext();
    for (auto& entry : saved_) entry.second = context.float32Precision(entry.first.first, entry.first.second);
    // With IEEE the old getter never disagrees, whatever mix of interfaces the user has set.
    context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, at::Float32Precision::IEEE);
    context.setFloat32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL, at::Float32Precision::IEEE);
    matmul_ = context.float32MatmulPrecision();
    context.setFloat32MatmulPrecision(tf32 ? "high" : "highest");
    set_convolutions(tf32);
  }

  void restore() const {
    constexpr const char* names[] = {"highest", "high", "medium"};
    at::globalContext().setFloat32MatmulPrecision(names[static_cast<int>(matmul_)]);
    set_convolutions(saved_[2].second == at::Float32Precision::TF32 && saved_[3].second == at::Float32Precision::TF32);
    for (const auto& [place, precision] : saved_) put_back(place.first, place.second, precision);
  }

 private:
  using Place = std::pair<at::Float32Backend, at::Float32Op>;

  static bool is_tf32(at::Float32Op op) {
    return at::globalContext().float32Precision(at::Float32Backend::CUDA, op) == at::Float32Precision::TF32;
  }
  // Left alone when they say so already: the default is a value that cannot be set again.
  static void set_convolutions(bool tf32) {
    if (is_tf32(at::Float32Op::CONV) != tf32 || is_tf32(at::Float32Op::RNN) != tf32)
      at::globalContext().setAllowTF32CuDNN(tf32);
  }
  static void put_back(at::Float32Backend backend, at::Float32Op op, at::Float32Precision precision) {
    auto& context = at::globalContext();
    if (context.float32Precision(backend, op) == precision) return;
    context.setFloat32Precision(backend, op,
                                at::Float32Precision::NONE);  // inherits, as it did if that gives the value
    if (context.float32Precision(backend, op) != precision) context.setFloat32Precision(backend, op, precision);
  }

  at::Float32MatmulPrecision matmul_{};
  std::pair<Place, at::Float32Precision> saved_[4] = {
      {{at::Float32Backend::CUDA, at::Float32Op::MATMUL}, at::Float32Precision::NONE},
      {{at::Float32Backend::MKLDNN, at::Float32Op::MATMUL}, at::Float32Precision::NONE},
      {{at::Float32Backend::CUDA, at::Float32Op::CONV}, at::Float32Precision::NONE},
      {{at::Float32Backend::CUDA, at::Float32Op::RNN}, at::Float32Precision::NONE}};
};

// The switches behind equal bits from run to run.
class DeterminismSwitches {
 public:
  // Notes the present state and sets every switch to the value that makes two runs equal.
  DeterminismSwitches() : found_(Values::now()) { Values{}.set(); }

  void restore() const { found_.set(); }

 private:
  using Reduction = at::CuBLASReductionOption;

  // As they are when two runs must be equal.
  struct Values {
    bool algorithms = true, warn_only = false;
    bool cudnn = true, mkldnn = true, fill_uninitialized = true;
    bool benchmark = false;  // timing chooses the kernel
    bool fp16_accumulation = false, math_attention = false, fp16_on_cpu = false;
    Reduction fp16 = Reduction::DisallowReducedPrecisionAllowSplitK;
    Reduction bf16 = Reduction::DisallowReducedPrecisionAllowSplitK;

    static Values now() {
      const auto& context = at::globalContext();
      return {.algorithms = context.deterministicAlgorithms(),
              .warn_only = context.deterministicAlgorithmsWarnOnly(),
              .cudnn = context.deterministicCuDNN(),
              .mkldnn = context.deterministicMkldnn(),
              .fill_uninitialized = context.deterministicFillUninitializedMemory(),
              .benchmark = context.benchmarkCuDNN(),
              .fp16_accumulation = context.allowFP16AccumulationCuBLAS(),
              .math_attention = context.allowFP16BF16ReductionMathSDP(),
              .fp16_on_cpu = context.allowFP16ReductionCPU(),
              .fp16 = context.allowFP16ReductionCuBLAS(),
              .bf16 = context.allowBF16ReductionCuBLAS()};
    }
    void set() const {
      auto& context = at::globalContext();
      context.setDeterministicAlgorithms(algorithms, warn_only);
      context.setDeterministicCuDNN(cudnn);
      context.setDeterministicMkldnn(mkldnn);
      context.setDeterministicFillUninitializedMemory(fill_uninitialized);
      context.setBenchmarkCuDNN(benchmark);
      context.setAllowFP16AccumulationCuBLAS(fp16_accumulation);
      context.setAllowFP16BF16ReductionMathSDP(math_attention);
      context.setAllowFP16ReductionCPU(fp16_on_cpu);
      context.setAllowFP16ReductionCuBLAS(reduced(fp16), split(fp16));
      context.setAllowBF16ReductionCuBLAS(reduced(bf16), split(bf16));
    }
    static bool reduced(Reduction option) { return option == Reduction::AllowReducedPrecisionWithSplitK; }
    static bool split(Reduction option) { return option != Reduction::DisallowReducedPrecisionDisallowSplitK; }
  };

  Values found_;
};

}  // namespace frugal::inline v0::detail
