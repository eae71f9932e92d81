#include "measure.hpp"
#include "subject.hpp"

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <utility>
#include <vector>

// What the machine can do at best: matrix products, memory, disk.
namespace bench {
namespace {

/// LibTorch's matrix product of two square matrices, in the dtype of the method: matmul/fp32, matmul/tf32, matmul/bf16,
/// matmul/fp16.
class Matmul final : public Subject {
 public:
  explicit Matmul(const Settings& settings)
      : method_(settings.method), size_(settings.batch > 0 ? settings.batch : 2048) {
    const std::map<std::string, at::ScalarType> dtypes = {{"matmul/fp32", at::kFloat},
                                                          {"matmul/tf32", at::kFloat},
                                                          {"matmul/bf16", at::kBFloat16},
                                                          {"matmul/fp16", at::kHalf}};
    const auto found = dtypes.find(method_);
    if (found == dtypes.end()) throw std::invalid_argument("There is no ceiling " + method_);
    at::globalContext().setFloat32MatmulPrecision(method_ == "matmul/tf32" ? "high" : "highest");
    const auto options = torch::TensorOptions(found->second).device(settings.device);
    torch::manual_seed(1);
    left_ = torch::randn({size_, size_}).to(options), right_ = torch::randn({size_, size_}).to(options);
    out_ = torch::empty({size_, size_}, options);
  }
  std::string what() const override { return method_ + " of " + std::to_string(size_) + " x " + std::to_string(size_); }
  Json run(std::int64_t n) override {
    return Json{{"seconds", seconds_of([&] {
                   for (std::int64_t i = 0; i < n; ++i) at::mm_out(out_, left_, right_);
                 })}};
  }
  Json check(std::int64_t, const std::string&) override { return Json{{"losses", std::vector<double>()}}; }
  Json compare(const std::string&) override { return Json{{"difference", 0}}; }
  Json work() const override {
    const auto size = static_cast<double>(size_);
    return Json{{"flops", 2 * size * size * size}};
  }

 private:
  std::string method_;
  std::int64_t size_;
  torch::Tensor left_, right_, out_;
};

/// memory/read (a sum), memory/copy, memory/triad (a = b + s c, McCalpin's STREAM) over arrays of 128 MiB, in plain loops on
/// all threads; on a GPU by LibTorch's kernels.
class Memory final : public Subject {
 public:
  explicit Memory(const Settings& settings) : method_(settings.method) {
    const auto options = torch::TensorOptions(torch::kFloat).device(settings.device);
    for (auto* array : {&a_, &b_, &c_}) *array = torch::ones({numbers}, options);
  }
  std::string what() const override { return method_ + " over 128 MiB"; }
  Json run(std::int64_t n) override {
    return Json{{"seconds", seconds_of([&] {
                   for (std::int64_t i = 0; i < n; ++i) a_.is_cpu() ? by_loops() : by_kernels();
                 })}};
  }
  Json check(std::int64_t, const std::string&) override { return Json{{"losses", std::vector<double>()}}; }
  Json compare(const std::string&) override { return Json{{"difference", 0}}; }
  Json work() const override {
    const double arrays = method_ == "memory/read" ? 1 : method_ == "memory/copy" ? 2 : 3;
    return Json{{"bytes", arrays * 4.0 * static_cast<double>(numbers)}};
  }

 private:
  static constexpr std::int64_t numbers = std::int64_t{32} << 20;

  void by_loops() {
    auto* const a = a_.mutable_data_ptr<float>();
    const auto* const b = b_.const_data_ptr<float>();
    const auto* const c = c_.const_data_ptr<float>();
    at::parallel_for(0, numbers, numbers / at::get_num_threads(), [&](std::int64_t from, std::int64_t to) {
      if (method_ == "memory/copy") {
        for (std::int64_t i = from; i < to; ++i) a[i] = b[i];
      } else if (method_ == "memory/triad") {
        for (std::int64_t i = from; i < to; ++i) a[i] = b[i] + 3.0f * c[i];
      } else {
        float sums[64] = {};  // in vector registers
        for (std::int64_t i = from; i + 64 <= to; i += 64)
          for (int k = 0; k < 64; ++k) sums[k] += b[i + k];
        for (const float sum : sums) sum_ = sum_ + sum;
      }
    });
  }
  void by_kernels() {
    if (method_ == "memory/copy") a_.copy_(b_);
    else if (method_ == "memory/triad") at::add_out(a_, b_, c_, 3);
    else sum_ = 0, b_.sum();
  }

  std::string method_;
  torch::Tensor a_, b_, c_;
  volatile float sum_ = 0;
};

/// disk/write: 64 MiB into a new file, and fsync.
class Disk final : public Subject {
 public:
  explicit Disk(const Settings& settings)
      : file_(std::filesystem::path(settings.directory) / ("disk-" + std::to_string(::getpid()))),
        bytes_(std::size_t{64} << 20, 'x') {}
  ~Disk() override { std::filesystem::remove(file_); }
  std::string what() const override { return "64 MiB into a new file, and fsync"; }
  Json run(std::int64_t n) override {
    double seconds = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      std::filesystem::remove(file_);
      seconds += seconds_of([&] {
        const int out = ::open(file_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
        for (std::size_t at = 0; out >= 0 && at < bytes_.size();) {
          const auto written = ::write(out, bytes_.data() + at, bytes_.size() - at);
          if (written <= 0) throw std::runtime_error("cannot write " + file_.string());
          at += static_cast<std::size_t>(written);
        }
        if (out < 0 || ::fsync(out) != 0) throw std::runtime_error("cannot write " + file_.string());
        ::close(out);
      });
    }
    return Json{{"seconds", seconds}};
  }
  Json check(std::int64_t, const std::string&) override { return Json{{"losses", std::vector<double>()}}; }
  Json compare(const std::string&) override { return Json{{"difference", 0}}; }
  Json work() const override { return Json{{"bytes", bytes_.size()}}; }

 private:
  std::filesystem::path file_;
  std::vector<char> bytes_;
};

}  // namespace

std::unique_ptr<Subject> make_ceiling(const Settings& settings) {
  if (settings.method.starts_with("matmul/")) return std::make_unique<Matmul>(settings);
  if (settings.method.starts_with("memory/")) return std::make_unique<Memory>(settings);
  if (settings.method == "disk/write") return std::make_unique<Disk>(settings);
  throw std::invalid_argument("There is no ceiling " + settings.method +
                              ". There are matmul/..., memory/..., disk/write.");
}

}  // namespace bench
