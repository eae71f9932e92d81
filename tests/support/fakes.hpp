#pragma once

#include <frugal/policy.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

/// A training loop's parts without tensors: one weight, one gradient, and a log of what happened in which order.
namespace fakes {

using Log = std::vector<std::string>;

struct Model {
  double weight = 0, gradient = 0;
  bool training = false;
  Log* log = nullptr;

  void note(const char* what) const {
    if (log) log->push_back(what);
  }
  void train() { training = true, note("train"); }
  void eval() { training = false, note("eval"); }
};

/// Its gradient is its value, so that sums and means can be checked by hand.
struct Loss {
  double value;
  Model* model;

  void backward() const { model->gradient += value, model->note("backward"); }
  Loss operator*(double factor) const { return {value * factor, model}; }
  explicit operator double() const { return value; }
};

/// weight -= gradient.
struct Optimizer {
  Model& model;
  double rate = 1;
  std::vector<double> seen = {};  // the gradient of every step

  void step() {
    model.note("step");
    seen.push_back(model.gradient);
    model.weight -= rate * model.gradient;
  }
  void zero_grad() { model.gradient = 0, model.note("zero_grad"); }
  void multiply_gradients(double factor) { model.gradient *= factor, model.note("multiply"); }
};

struct Batch {
  double mean = 1;
  std::int64_t samples = 1;
  std::int64_t size() const { return samples; }
};

inline Loss mean_loss(Model& model, const Batch& batch) {
  model.note("forward");
  return {batch.mean, &model};
}

/// Name-value pairs in memory, both ways.
class Archive {
 public:
  template <class Value>
  void write(std::string_view name, const Value& value) {
    values_[std::string(name)] = value;
  }
  template <class Value>
  void read(std::string_view name, Value& value) const {
    value = std::get<Value>(values_.at(std::string(name)));
  }
  bool has(std::string_view name) const { return values_.contains(std::string(name)); }
  std::size_t size() const { return values_.size(); }

 private:
  std::map<std::string, std::variant<std::int64_t, double, std::string>> values_;
};

}  // namespace fakes
