#pragma once

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <iterator>
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
  DeterminismSwitches() {
    auto& context = at::globalContext();
    algorithms_ = context.deterministicAlgorithms();
    warn_only_ = context.deterministicAlgorithmsWarnOnly();
    fp16_reduction_ = context.allowFP16ReductionCuBLAS();
    bf16_reduction_ = context.allowBF16ReductionCuBLAS();
    for (int i = 0; i < count; ++i) saved_[i] = (context.*switches[i].get)();

    context.setDeterministicAlgorithms(true, /*warn_only=*/false);
    context.setAllowFP16ReductionCuBLAS(false);
    context.setAllowBF16ReductionCuBLAS(false);
    for (const auto& one : switches) (context.*one.set)(one.exact);
  }

  void restore() const {
    using Option = at::CuBLASReductionOption;
    auto& context = at::globalContext();
    const auto reduced = [](Option o) { return o == Option::AllowReducedPrecisionWithSplitK; };
    const auto split = [](Option o) { return o != Option::DisallowReducedPrecisionDisallowSplitK; };
    context.setDeterministicAlgorithms(algorithms_, warn_only_);
    context.setAllowFP16ReductionCuBLAS(reduced(fp16_reduction_), split(fp16_reduction_));
    context.setAllowBF16ReductionCuBLAS(reduced(bf16_reduction_), split(bf16_reduction_));
    for (int i = 0; i < count; ++i) (context.*switches[i].set)(saved_[i]);
  }

 private:
  struct Switch {
    bool (at::Context::*get)() const;
    void (at::Context::*set)(bool);
    bool exact;  // the value that makes two runs equal
  };
  static constexpr Switch switches[] = {
      {&at::Context::deterministicCuDNN, &at::Context::setDeterministicCuDNN, true},
      {&at::Context::deterministicMkldnn, &at::Context::setDeterministicMkldnn, true},
      {&at::Context::benchmarkCuDNN, &at::Context::setBenchmarkCuDNN, false},  // timing chooses the kernel
      {&at::Context::deterministicFillUninitializedMemory, &at::Context::setDeterministicFillUninitializedMemory, true},
      {&at::Context::allowFP16AccumulationCuBLAS, &at::Context::setAllowFP16AccumulationCuBLAS, false},
      {&at::Context::allowFP16BF16ReductionMathSDP, &at::Context::setAllowFP16BF16ReductionMathSDP, false},
      {&at::Context::allowFP16ReductionCPU, &at::Context::setAllowFP16ReductionCPU, false}};
  static constexpr int count = static_cast<int>(std::size(switches));

  bool algorithms_, warn_only_, saved_[count];
  at::CuBLASReductionOption fp16_reduction_, bf16_reduction_;
};

}  // namespace frugal::inline v0::detail
