#pragma once

#include "subject.hpp"

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#define BENCH_CALLGRIND(request) request
#else
#define BENCH_CALLGRIND(request)
#endif

// What subjects measure with: operators, weights on disk.
namespace bench {

/// Counts LibTorch's operators on every thread while it lives.
class Operators {
 public:
  Operators() {
    all_ = casts_ = reads_ = 0;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&note).scopes({at::RecordScope::FUNCTION}));
  }
  Operators(const Operators&) = delete;
  ~Operators() { at::removeCallback(handle_); }

  std::int64_t all() const { return all_; }
  std::int64_t casts() const { return casts_; }  // copies into another dtype
  std::int64_t reads() const { return reads_; }  // values read back from a device

 private:
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
    const std::string_view name = function.name();
    ++all_;
    if (name == "aten::_to_copy") ++casts_;
    if (name == "aten::_local_scalar_dense") ++reads_;
    return nullptr;
  }
  static inline std::atomic<std::int64_t> all_, casts_, reads_;
  at::CallbackHandle handle_;
};

inline torch::Tensor flattened(const std::vector<torch::Tensor>& tensors) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> parts;
  for (const auto& tensor : tensors) parts.push_back(tensor.detach().to(torch::kCPU, torch::kFloat).flatten());
  return torch::cat(parts).contiguous();
}

inline void write_bytes(const torch::Tensor& tensor, const std::string& file) {
  const auto values = tensor.contiguous().to(torch::kCPU);
  std::ofstream out(file, std::ios::binary);
  out.write(static_cast<const char*>(values.const_data_ptr()), static_cast<std::streamsize>(values.nbytes()));
  if (!out.flush()) throw std::runtime_error("cannot write " + file);
}

inline torch::Tensor read_floats(const std::string& file, std::int64_t count) {
  auto values = torch::empty({count}, torch::kFloat);
  std::ifstream in(file, std::ios::binary | std::ios::ate);
  if (!in || in.tellg() != static_cast<std::streamoff>(values.nbytes()))
    throw std::runtime_error(file + " does not hold " + std::to_string(count) + " numbers");
  in.seekg(0);
  in.read(static_cast<char*>(values.mutable_data_ptr()), static_cast<std::streamsize>(values.nbytes()));
  return values;
}

/// {"difference": |ours - theirs| / |theirs - start|, how far apart two trainings ended, as a share of how far they went;
/// "moved": |ours - start| / |theirs - start|, which is far from 1 when one made fewer steps}.
inline Json comparison(const torch::Tensor& ours, const std::string& theirs, const torch::Tensor& start) {
  const auto other = read_floats(theirs, ours.numel());
  const auto length = [](const torch::Tensor& way) { return way.norm().item<double>(); };
  const double apart = length(ours - other), moved = length(ours - start), expected = length(other - start);
  if (expected == 0) return Json{{"difference", apart}};
  return Json{{"difference", apart / expected}, {"moved", moved / expected}};
}

}  // namespace bench
