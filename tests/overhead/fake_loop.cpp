// The loop alone: a model of one number, so that everything that remains to be counted is the loop's own bookkeeping.
#include "measure.hpp"

#include <frugal/grad_accumulator.hpp>
#include <frugal/observers.hpp>
#include <frugal/trainer.hpp>

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

struct Model { double weight = 0, gradient = 0; };
struct Batch {
  double mean = 1;
  std::int64_t samples = 2;
  std::int64_t size() const { return samples; }
};

// The work: not inlined, so that hand loop and Trainer call the same code and cannot be fused with it.
OVERHEAD_OPAQUE void add_gradient(Model& model, double value) { model.gradient += value; }
OVERHEAD_OPAQUE double forward(Model& model, const Batch& batch) { return model.weight * batch.mean; }
OVERHEAD_OPAQUE void descend(Model& model) { model.weight -= 0.01 * model.gradient; }
OVERHEAD_OPAQUE void clear(Model& model) { model.gradient = 0; }

struct Loss {
  double value;
  Model* model;
  void backward() const { add_gradient(*model, value); }
  Loss mul(double factor) const { return {value * factor, model}; }
  explicit operator double() const { return value; }
};
struct Optimizer {
  Model& model;
  void step() { descend(model); }
  void zero_grad() { clear(model); }
  void multiply_gradients(double factor) { model.gradient *= factor; }
};
struct MeanLoss {
  Loss operator()(Model& model, const Batch& batch) const { return {forward(model, batch), &model}; }
};

constexpr std::int64_t window = 4;

// What a hand-written loop writes down when it wants to report where it stands.
struct Books {
  std::int64_t micro_batches = 0, steps = 0, samples = 0;
  double loss = std::numeric_limits<double>::quiet_NaN();
};

struct Loop {
  Model model{.weight = 1};
  Optimizer optimizer{model};
  MeanLoss loss{};
};

struct BareByHand : Loop {
  void step(const Batch& batch) {
    const Loss value = loss(model, batch);
    value.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
};
struct ByHand : Loop {
  Books books;
  void step(const Batch& batch) {
    const Loss value = loss(model, batch);
    value.backward();
    ++books.micro_batches;
    books.samples += batch.size();
    books.loss = static_cast<double>(value);
    optimizer.step();
    optimizer.zero_grad();
    ++books.steps;
  }
};

struct BareAccumulatingByHand : Loop {
  std::int64_t seen = 0;
  void step(const Batch& batch) {
    loss(model, batch).mul(1.0 / window).backward();
    if (++seen < window) return;
    seen = 0;
    optimizer.step();
    optimizer.zero_grad();
  }
};
// Keeps what it takes to weigh uneven micro-batches and a short last window rightly, and to report a window's loss.
struct AccumulatingByHand : Loop {
  Books books;
  std::int64_t seen = 0;
  double weight = 0, first = 0;
  bool even = true;
  std::vector<std::pair<double, double>> open, closed;

  void step(const Batch& batch) {
    const Loss value = loss(model, batch);
    const auto samples = static_cast<double>(batch.size());
    if (samples > 0) {
      if (weight == 0) first = samples;
      value.mul(samples / (first * window)).backward();
      weight += samples;
      even = even && samples == first;
    }
    ++seen;
    ++books.micro_batches;
    books.samples += batch.size();
    open.emplace_back(static_cast<double>(value), samples);
    if (seen < window) return;
    if (!even) optimizer.multiply_gradients(first * window / weight);
    optimizer.step();
    optimizer.zero_grad();
    seen = 0, weight = 0, first = 0, even = true;
    ++books.steps;
    std::swap(open, closed);
    open.clear();
  }
};

template <class... Policies>
struct ByTrainer : Loop {
  frugal::Trainer<Model, Optimizer, MeanLoss, Policies...> trainer;
  explicit ByTrainer(Policies... policies) : trainer(model, optimizer, loss, std::move(policies)...) {}
  void step(const Batch& batch) { trainer.step(batch); }
};

// What would be a mistake in the Trainer: readings that nobody asked for.
struct Careless : ByHand {
  void step(const Batch& batch) {
    ByHand::step(batch);
    const frugal::Readings now([this](frugal::Readings& out) { out.write("loss", books.loss); });
    look(now);
  }
  OVERHEAD_OPAQUE static void look(const frugal::Readings& now) { asm volatile("" : : "g"(&now) : "memory"); }
};

constexpr std::int64_t steps = 1000;

struct Measurement {
  overhead::Checks checks;
  void operator()(const char* name, auto loop) {
    const Batch batch;
    if (overhead::under_callgrind()) overhead::count_instructions(name, loop, batch, steps);
    else checks.equal(name, overhead::allocations(loop, batch, steps), 0);
  }
};

}  // namespace

int main() {
  Measurement measure;
  if (!overhead::under_callgrind()) std::puts("heap allocations in 1000 micro-batches:");
  measure("plain bare", BareByHand{});
  measure("plain hand", ByHand{});
  measure("plain trainer", ByTrainer<>{});
  measure("plain careless", Careless{});
  measure("accumulating bare", BareAccumulatingByHand{});
  measure("accumulating hand", AccumulatingByHand{});
  measure("accumulating trainer", ByTrainer<frugal::GradAccumulator>(frugal::GradAccumulator(window)));
  const auto epochs = frugal::OnEpoch{[](const frugal::Progress&) {}};  // nothing to do in a step
  measure("observed hand", ByHand{});
  measure("observed trainer", ByTrainer<std::remove_const_t<decltype(epochs)>>(epochs));
  return measure.checks.exit_code();
}
