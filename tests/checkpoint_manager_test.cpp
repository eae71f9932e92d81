#include "support/catch.hpp"
#include "support/caught_warnings.hpp"
#include "support/states.hpp"
#include "support/temporary_directory.hpp"

#include <frugal/checkpoint_manager.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/testing.hpp>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <future>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

using namespace frugal;
using frugal::testing::FailingStorage;
using frugal::testing::FailingStorageOptions;
using frugal::testing::FakeClock;
using torch::nn::Linear;
using torch::optim::SGD;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

// A model whose weights are all one number, so that what was saved when is visible.
struct Run {
  Linear model{2, 1};
  SGD optimizer{model->parameters(), 0.1};

  explicit Run(double value = 0) { fill(value); }
  void fill(double value) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.fill_(value);
  }
  double value() const { return model->weight[0][0].item<double>(); }
  bool is_all(double value) const {
    return model->weight.eq(value).all().item<bool>() && model->bias.eq(value).all().item<bool>();
  }
};

// Step n, saved with weights that are n.
Progress at_step(std::int64_t n) { return {.epoch = n, .step = n}; }
void save_step(auto& checkpoints, Run& run, std::int64_t n) {
  run.fill(static_cast<double>(n));
  checkpoints.save(at_step(n), run.model, run.optimizer);
}
std::vector<std::int64_t> steps_in(const auto& checkpoints) {
  std::vector<std::int64_t> steps;
  for (const auto& found : checkpoints.list()) steps.push_back(found.valid ? found.progress.step : -1);
  return steps;
}
using Steps = std::vector<std::int64_t>;

std::string error_of(auto&& call) {
  try {
    call();
  } catch (const c10::Error& error) { return error.what_without_backtrace(); } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

// Everything that a value can be.
struct Values {
  static constexpr std::string_view state_name = "values";
  double number = 0;
  std::int64_t count = 0;
  std::string text;
  at::Tensor tensor, none;

  void save(auto& out) const {
    out.write("number", number);
    out.write("count", count);
    out.write("text", text);
    out.write("tensor", tensor);
    out.write("none", none);
  }
  void load(auto& in) {
    in.read("number", number);
    in.read("count", count);
    in.read("text", text);
    in.read("tensor", tensor);
    in.read("none", none);
    if (in.has("later")) throw std::logic_error("nobody saved this");
  }
};

// Loads into the memory that it has, as an average on a device would.
struct InPlace {
  at::Tensor tensor = torch::zeros({2});
  void save(auto& out) const { out.write("tensor", tensor); }
  void load(auto& in) {
    at::Tensor saved;
    in.read("tensor", saved);
    tensor.copy_(saved);
  }
};

// Refuses what it reads, after it has taken half of it.
struct Picky {
  static constexpr Role role = Role::observer;
  std::int64_t half = 1;
  bool refuses = false;
  void save(auto& out) const { out.write("half", half); }
  void load(auto& in) {
    in.read("half", half);
    if (refuses && half == 7) throw std::runtime_error("not this one");
  }
};

}  // namespace

TEST_CASE("what was saved comes back, in fresh objects") {
  const TemporaryDirectory folder;
  Run run(3), other;
  EarlyStopper stopper({.patience = 2}), stopper2({.patience = 2});
  stopper.observe(0.5), stopper.observe(0.75);
  const Progress at{.epoch = 2,
                    .micro_batch = 3,
                    .step = 11,
                    .skipped = 1,
                    .samples = 400,
                    .loss = 0.1,
                    .metric = -std::numeric_limits<double>::infinity(),
                    .metric_step = 11};
  {
    CheckpointManager checkpoints({.directory = folder / "runs" / "one"});
    checkpoints.save(at, run.model, run.optimizer, stopper);
  }
  CheckpointManager checkpoints({.directory = folder / "runs" / "one"});
  const std::optional<Progress> back = checkpoints.restore(other.model, other.optimizer, stopper2);
  REQUIRE(back);
  CHECK(back->epoch == 2);
  CHECK(back->micro_batch == 3);
  CHECK(back->step == 11);
  CHECK(back->skipped == 1);
  CHECK(back->samples == 400);
  CHECK(back->loss == 0.1);
  CHECK(back->metric == -std::numeric_limits<double>::infinity());
  CHECK(back->metric_step == 11);
  CHECK(other.is_all(3));
  CHECK(stopper2.best() == 0.5);
  CHECK(stopper2.waited() == 1);

  const auto files = checkpoints.list();
  REQUIRE(files.size() == 1);
  CHECK(files[0].valid);
  CHECK(files[0].problem.empty());
  CHECK(files[0].progress.step == 11);
  CHECK(files[0].bytes == std::filesystem::file_size(files[0].path));
  CHECK(files[0].path.filename() == "checkpoint-00000001.safetensors");
}

TEST_CASE("values come back exactly: NaN with its bits, infinities, -0, any bytes, undefined tensors, every dtype") {
  const TemporaryDirectory folder;
  Run run;
  CheckpointManager checkpoints({.directory = folder.path()});
  const double odd_nan = std::bit_cast<double>(std::uint64_t{0xfff8000000000123});
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double number :
       {not_a_number, odd_nan, infinity, -infinity, -0.0, 0.1, 5e-324, 1.7976931348623157e308, 3.0}) {
    for (const auto type :
         {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar, at::kByte,
          at::kBool, at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexFloat}) {
      Values saved{number, std::numeric_limits<std::int64_t>::min(), std::string("a\0\n\"\xff\xfe int:3", 12), {}, {}},
          back;
      saved.tensor = torch::ones({2, 3}).mul(type == at::kBool ? 1 : 5).to(type);
      back.none = torch::ones({1});
      checkpoints.save({}, run.model, run.optimizer, saved);
      REQUIRE(checkpoints.restore(run.model, run.optimizer, back));
      REQUIRE(std::bit_cast<std::uint64_t>(back.number) == std::bit_cast<std::uint64_t>(number));
      REQUIRE(back.count == saved.count);
      REQUIRE(back.text == saved.text);
      REQUIRE(back.tensor.scalar_type() == type);
      REQUIRE(same_bits(back.tensor, saved.tensor));
      REQUIRE_FALSE(back.none.defined());
    }
  }
}

TEST_CASE("tensors that are views, conjugated, empty or 0-dim are saved as what they show") {
  const TemporaryDirectory folder;
  Run run;
  CheckpointManager checkpoints({.directory = folder.path()});
  const auto grid = torch::arange(24, torch::kFloat).view({2, 3, 4});
  const auto complex = torch::complex(grid, grid.add(1));
  for (const at::Tensor& tensor : {grid.transpose(0, 2), grid.select(1, 1), grid.flip(0), complex.conj(),
                                   torch::view_as_real(complex).select(-1, 1), torch::zeros({0, 3}), torch::tensor(2.5),
                                   torch::_neg_view(grid), grid.expand({2, 2, 3, 4})}) {
    Values saved{0, 0, "", tensor, {}}, back;
    checkpoints.save({}, run.model, run.optimizer, saved);
    REQUIRE(checkpoints.restore(run.model, run.optimizer, back));
    CHECK(torch::equal(back.tensor, tensor.resolve_conj().resolve_neg()));
  }
  Values sparse{0, 0, "", torch::eye(2).to_sparse(), {}};
  CHECK_THAT(error_of([&] { checkpoints.save({}, run.model, run.optimizer, sparse); }),
             ContainsSubstring("'state/values/tensor' is a Sparse Float tensor"));
}

TEST_CASE("without a directory nothing happens, and nothing is touched before the first save") {
  Run run(1);
  CheckpointManager off({.every_steps = 1});
  CHECK_FALSE(off.due(at_step(1)));
  off.save(at_step(1), run.model, run.optimizer);
  off.claim();
  off.wait();
  CHECK_FALSE(off.restore(run.model, run.optimizer));
  CHECK_FALSE(off.restore_best(run.model));
  CHECK(off.list().empty());

  const TemporaryDirectory folder;
  CheckpointManager reading({.directory = folder / "missing"});
  CHECK(reading.list().empty());
  CHECK_FALSE(reading.restore(run.model, run.optimizer));
  CHECK_FALSE(reading.restore_best(run.model));
  CHECK_FALSE(std::filesystem::exists(folder / "missing"));
  CHECK(run.is_all(1));

  CHECK_THROWS_AS(CheckpointManager({.directory = folder / "x", .keep_last = 0}), c10::Error);
  CHECK_THROWS_AS(CheckpointManager({.directory = folder / "x", .keep_best = -1}), c10::Error);
  CHECK_THROWS_AS(CheckpointManager({.directory = folder / "x", .every_epochs = -1}), c10::Error);
  CHECK_THROWS_AS(CheckpointManager({.directory = folder / "x", .every_steps = -1}), c10::Error);
  CHECK_THROWS_AS(CheckpointManager({.directory = folder / "x", .every_time = std::chrono::seconds(-1)}), c10::Error);
}

TEST_CASE("what is written is the state at the call, and one write is in flight") {
  const TemporaryDirectory folder;
  FailingStorage storage;
  CheckpointManager checkpoints({.directory = folder.path(), .keep_last = 10}, storage);
  Run run;
  Values values{1, 2, "then", torch::zeros({3}), {}};
  run.fill(1);
  storage.hold();
  checkpoints.save(at_step(1), run.model, run.optimizer, values);  // returns although nothing can be written
  storage.wait_until_held();
  run.fill(2);
  values.number = 9, values.tensor.fill_(9);

  // the second save may not touch the first one's copy
  auto second = std::async(std::launch::async, [&] { checkpoints.save(at_step(2), run.model, run.optimizer, values); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // time to do it wrong
  storage.release();
  second.get();
  run.fill(3);
  checkpoints.wait();
  REQUIRE(steps_in(checkpoints) == Steps{1, 2});
  CHECK(checkpoints.restore(run.model, run.optimizer, values)->step == 2);
  CHECK(run.is_all(2));
  std::filesystem::remove(checkpoints.list().back().path);
  CHECK(checkpoints.restore(run.model, run.optimizer, values)->step == 1);
  CHECK(run.is_all(1));
  CHECK(values.number == 1);
  CHECK(values.tensor.eq(0).all().item<bool>());
}

TEST_CASE("an error of the writer surfaces once, and the older checkpoints stay") {
  const TemporaryDirectory folder;
  FailingStorage storage;
  Run run;
  CheckpointManager checkpoints({.directory = folder.path(), .keep_last = 1}, storage);
  save_step(checkpoints, run, 1);
  checkpoints.wait();
  storage.arm({.at_write = 1});
  save_step(checkpoints, run, 2);  // in the background
  CHECK(steps_in(checkpoints) == Steps{1});
  CHECK(checkpoints.restore(run.model, run.optimizer)->step == 1);
  CHECK_THAT(error_of([&] { checkpoints.wait(); }), ContainsSubstring("injected"));
  CHECK_NOTHROW(checkpoints.wait());

  storage.arm({.at_commit = 1});
  save_step(checkpoints, run, 3);
  CHECK_THAT(error_of([&] { save_step(checkpoints, run, 4); }), ContainsSubstring("injected"));
  CHECK(steps_in(checkpoints) == Steps{1});
  save_step(checkpoints, run, 5);
  checkpoints.wait();
  CHECK(steps_in(checkpoints) == Steps{5});

  CaughtWarnings warnings;
  {
    CheckpointManager dying(std::move(checkpoints));
    storage.arm({.at_write = 1});
    save_step(dying, run, 6);
  }
  CHECK(warnings.with("the last checkpoint was not written: FailingStorage: injected") == 1);
}

TEST_CASE("whichever storage call fails, a complete checkpoint is there and loads") {
  // Four saves with retention; the first is durable before anything fails.
  const auto saves = [](const TemporaryDirectory& folder, FailingStorage& storage, Writing writing,
                        const FailingStorageOptions& failure) {
    Run run;
    CheckpointManager checkpoints({.directory = folder.path(), .keep_last = 1, .writing = writing}, storage);
    save_step(checkpoints, run, 1);
    checkpoints.wait();
    storage.arm(failure);
    int errors = 0;
    for (int n = 2; n <= 4; ++n) {
      try {
        save_step(checkpoints, run, n);
        checkpoints.wait();
      } catch (const std::system_error& error) {
        CHECK_THAT(error.what(), ContainsSubstring("injected"));
        ++errors;
      }
      Run other;
      CheckpointManager reader({.directory = folder.path()});
      const auto at = reader.restore(other.model, other.optimizer);
      REQUIRE(at);
      REQUIRE(at->step >= n - errors);
      REQUIRE(other.is_all(static_cast<double>(at->step)));
    }
    return errors;
  };
  for (const Writing writing : {Writing::background, Writing::blocking}) {
    FailingStorage counting;
    {
      const TemporaryDirectory folder;
      CHECK(saves(folder, counting, writing, {}) == 0);
    }
    REQUIRE(counting.writes() >= 3);
    REQUIRE(counting.removes() == 3);
    std::vector<FailingStorageOptions> failures;
    for (std::int64_t i = 1; i <= counting.creates(); ++i) failures.push_back({.at_create = i});
    for (std::int64_t i = 1; i <= counting.writes(); ++i) failures.push_back({.at_write = i});
    for (std::int64_t i = 1; i <= counting.bytes(); i += 997) failures.push_back({.at_byte = i});
    for (std::int64_t i = 1; i <= counting.commits(); ++i) failures.push_back({.at_commit = i});
    for (std::int64_t i = 1; i <= counting.removes(); ++i) failures.push_back({.at_remove = i});
    for (const FailingStorageOptions& failure : failures) {
      const TemporaryDirectory folder;
      FailingStorage storage;
      CHECK(saves(folder, storage, writing, failure) == 1);
      CHECK(storage.failures() == 1);
      Run last;
      CheckpointManager checkpoints({.directory = folder.path(), .keep_last = 1}, storage);
      REQUIRE(checkpoints.restore(last.model, last.optimizer));
      save_step(checkpoints, last, 5);  // and what could not be removed goes with the next save
      checkpoints.wait();
      CHECK(steps_in(checkpoints) == Steps{5});
    }
  }
}

TEST_CASE("a process that died in the middle of a write leaves nothing that counts") {
  const TemporaryDirectory folder;
  Run run(1);
  {
    CheckpointManager checkpoints({.directory = folder.path()});
    save_step(checkpoints, run, 1);
  }
  write_text(folder / ".checkpoint-00000002.safetensors.99999.1.tmp", "half of it");
  write_text(folder / "notes.txt", "mine");
  CheckpointManager checkpoints({.directory = folder.path()});
  CHECK(checkpoints.restore(run.model, run.optimizer)->step == 1);
  CHECK(std::filesystem::exists(folder / ".checkpoint-00000002.safetensors.99999.1.tmp"));  // reading removes nothing
  save_step(checkpoints, run, 2);
  checkpoints.wait();
  CHECK_FALSE(std::filesystem::exists(folder / ".checkpoint-00000002.safetensors.99999.1.tmp"));
  CHECK(std::filesystem::exists(folder / "notes.txt"));
}

TEST_CASE("every flipped byte and every truncation is noticed, and nothing is changed") {
  const TemporaryDirectory folder;
  Run run(1);
  Picky policy{5};
  {
    CheckpointManager checkpoints({.directory = folder.path()});
    checkpoints.save(at_step(1), run.model, run.optimizer, policy);
  }
  CheckpointManager checkpoints({.directory = folder.path()});
  const auto path = checkpoints.list().at(0).path;
  const std::string sound = read_text(path);
  CaughtWarnings warnings;
  Run other(4);
  Picky other_policy{4};
  const frugal::detail::State before = stored(other.model, other.optimizer, other_policy);
  const auto refused = [&](const std::string& bytes) {
    write_text(path, bytes);
    try {
      checkpoints.restore(other.model, other.optimizer, other_policy);
      return false;
    } catch (const c10::Error&) { return true; }
  };
  std::string accepted;
  for (std::size_t i = 0; i < sound.size(); ++i) {
    std::string flipped = sound;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
    if (!refused(flipped)) accepted += " byte " + std::to_string(i);
  }
  for (std::size_t size = 0; size < sound.size(); ++size)
    if (!refused(sound.substr(0, size))) accepted += " size " + std::to_string(size);
  CHECK(accepted == "");
  CHECK(refused(sound + '\0'));
  CHECK(difference(stored(other.model, other.optimizer, other_policy), before) == "");
  CHECK_FALSE(refused(sound));
  CHECK(other.is_all(1));
}

TEST_CASE("a damaged newest file: the newest valid one, with a warning; it stays until valid ones are newer") {
  const TemporaryDirectory folder;
  Run run;
  {
    CheckpointManager checkpoints({.directory = folder.path(), .keep_last = 3});
    for (int n = 1; n <= 3; ++n) save_step(checkpoints, run, n);
  }
  CheckpointManager checkpoints({.directory = folder.path(), .keep_last = 2});
  const auto files = checkpoints.list();
  REQUIRE(files.size() == 3);
  std::string text = read_text(files[2].path);
  text.back() ^= 1;  // in a tensor: size and header are right
  write_text(files[2].path, text);
  CHECK(checkpoints.list()[2].valid);

  CaughtWarnings warnings;
  CHECK(checkpoints.restore(run.model, run.optimizer)->step == 2);
  CHECK(run.is_all(2));
  CHECK(warnings.count() == 1);
  CHECK(warnings.with(files[2].path.string()) == 1);

  save_step(checkpoints, run, 4);
  checkpoints.wait();
  CHECK(std::filesystem::exists(files[1].path));  // one of the two newest valid ones
  CHECK(std::filesystem::exists(files[2].path));  // damaged, but only one valid one is newer
  CHECK_FALSE(std::filesystem::exists(files[0].path));
  save_step(checkpoints, run, 5);
  checkpoints.wait();
  CHECK(steps_in(checkpoints) == Steps{4, 5});

  for (const auto& file : checkpoints.list()) write_text(file.path, "gone");
  CHECK_THAT(error_of([&] { checkpoints.restore(run.model, run.optimizer); }), ContainsSubstring("but none is valid"));
  CHECK(steps_in(checkpoints) == Steps{-1, -1});
  CHECK_FALSE(checkpoints.list()[0].problem.empty());
  CHECK_THAT(error_of([&] { checkpoints.restore_best(run.model); }), ContainsSubstring("but none is valid"));
}

TEST_CASE("a sound checkpoint of another model is an error that names the first difference, and no fallback") {
  const TemporaryDirectory folder;
  Linear model(3, 2);
  SGD optimizer(model->parameters(), 0.1);
  CheckpointManager checkpoints({.directory = folder.path()});
  checkpoints.save(at_step(1), model, optimizer);
  checkpoints.save(at_step(2), model, optimizer);

  const auto refused = [&](auto& other, const std::string& why) {
    SGD other_optimizer(other->parameters(), 0.5);
    const frugal::detail::State before = stored(other, other_optimizer);
    CaughtWarnings warnings;
    const std::string error = error_of([&] { checkpoints.restore(other, other_optimizer); });
    CHECK_THAT(error, ContainsSubstring(why));
    CHECK_THAT(error, ContainsSubstring("checkpoint-00000002.safetensors"));
    CHECK_THAT(error_of([&] { checkpoints.restore_best(other); }), ContainsSubstring("no error"));  // no metric: none
    CHECK(warnings.count() == 0);
    CHECK(difference(stored(other, other_optimizer), before) == "");
  };
  Linear wider(4, 2), without_bias(torch::nn::LinearOptions(3, 2).bias(false)), wide_type(3, 2);
  wide_type->to(torch::kDouble);
  refused(wider, "'model/weight' is Float [2, 3] there and Float [2, 4] here");
  refused(wide_type, "'model/bias' is Float [2] there and Double [2] here");
  refused(without_bias, "it has 'model/bias', which this one lacks");
  torch::nn::Sequential nested(Linear(3, 2));
  refused(nested, "it has no 'model/0.bias'");

  Progress best = at_step(3);
  best.metric = 1, best.metric_step = 3;
  checkpoints.save(best, model, optimizer);
  CHECK_THAT(error_of([&] { checkpoints.restore_best(wider); }), ContainsSubstring("'model/weight' is Float [2, 3]"));
}

TEST_CASE("an object that refuses its state leaves everything as it was") {
  const TemporaryDirectory folder;
  Run run(1), other(2);
  Values values{1, 1, "saved", torch::ones({2}), {}}, other_values{2, 2, "live", torch::zeros({2}), {}};
  Picky picky{7}, other_picky{3, true};
  InPlace average, other_average;
  average.tensor.fill_(5);
  CheckpointManager checkpoints({.directory = folder.path()});
  checkpoints.save(at_step(1), run.model, run.optimizer, values, average, picky);
  torch::manual_seed(1);
  const auto everything = [&] {
    return stored(other.model, other.optimizer, other_values, other_average, other_picky);
  };
  const frugal::detail::State before = everything();
  CHECK_THAT(
      error_of([&] { checkpoints.restore(other.model, other.optimizer, other_values, other_average, other_picky); }),
      ContainsSubstring("not this one"));
  CHECK(difference(everything(), before) == "");
  CHECK(other_picky.half == 3);
}

TEST_CASE(
    "an object that the checkpoint does not know stays as it is, with one warning; so does state that nobody takes") {
  const TemporaryDirectory folder;
  Run run(1);
  CheckpointManager checkpoints({.directory = folder.path()});
  Picky picky{7}, second{8};
  checkpoints.save(at_step(1), run.model, run.optimizer, picky);
  Values values{5, 5, "mine", {}, {}};
  {
    CaughtWarnings warnings;
    checkpoints.restore(run.model, run.optimizer, values, picky, second);
    CHECK(warnings.count() == 1);
    CHECK(warnings.with("does not know 'state/values' 'state/observer.1'") == 1);
    CHECK(values.number == 5);
    CHECK(second.half == 8);
  }
  CaughtWarnings warnings;
  checkpoints.restore(run.model, run.optimizer);
  CHECK(warnings.count() == 1);
  CHECK(warnings.with("nobody takes the state of 'state/observer'") == 1);
}

TEST_CASE("sections: repeats are counted, and a model's names never meet another model's") {
  const TemporaryDirectory folder;
  torch::nn::Sequential model(Linear(1, 1), Linear(1, 1)), model2(Linear(1, 1), Linear(1, 1));
  Linear further(1, 1), further2(1, 1);  // "model.1" has a weight, and so has "1" in "model"
  SGD optimizer(model->parameters(), 0.1), optimizer2(model2->parameters(), 0.1);
  Picky one{1}, two{2}, one2{0}, two2{0};
  CheckpointManager checkpoints({.directory = folder.path()});
  checkpoints.save(at_step(1), model, optimizer, one, further, two);
  checkpoints.restore(model2, optimizer2, one2, further2, two2);
  CHECK(difference(stored(model, optimizer, one, further, two), stored(model2, optimizer2, one2, further2, two2)) ==
        "");
  CHECK(one2.half == 1);
  CHECK(two2.half == 2);
}

namespace {

struct Twice {
  void save(auto& out) const { out.write("x", 1.0), out.write("x", 2.0); }
  void load(auto&) {}
};
struct Number {
  void save(auto& out) const { out.write("x", 1.0); }
  void load(auto&) {}
};
struct Text {
  std::string x;
  void save(auto& out) const { out.write("x", x); }
  void load(auto& in) { in.read("x", x); }
};
struct Other {
  void save(auto& out) const { out.write("y", 1.0); }
  void load(auto& in) {
    double y = 0;
    in.read("y", y);
  }
};

}  // namespace

TEST_CASE("a value that is written twice, read with another type, or missing is an error") {
  const TemporaryDirectory folder;
  Run run;
  Twice twice;
  Number number;
  Text text;
  Other other;
  CheckpointManager checkpoints({.directory = folder.path()});
  CHECK_THAT(error_of([&] { checkpoints.save({}, run.model, run.optimizer, twice); }),
             ContainsSubstring("saved twice"));
  checkpoints.save({}, run.model, run.optimizer, number);
  CHECK_THAT(error_of([&] { checkpoints.restore(run.model, run.optimizer, text); }), ContainsSubstring("another type"));
  CHECK_THAT(error_of([&] { checkpoints.restore(run.model, run.optimizer, other); }),
             ContainsSubstring("no 'state/object/y'"));
}

TEST_CASE("retention: the newest, and the best whose metric belongs to its weights") {
  const auto saved = [](CheckpointManagerOptions options, const std::vector<std::pair<double, bool>>& metrics) {
    const TemporaryDirectory folder;
    options.directory = folder.path();
    Run run;
    CheckpointManager checkpoints(options);
    std::int64_t n = 0;
    for (const auto& [metric, belongs] : metrics) {
      run.fill(static_cast<double>(++n));
      Progress at = at_step(n);
      at.metric = metric, at.metric_step = belongs ? n : n - 1;
      checkpoints.save(at, run.model, run.optimizer);
    }
    checkpoints.wait();
    const bool any = checkpoints.restore_best(run.model);
    return std::pair(steps_in(checkpoints), any ? run.value() : -1);
  };
  const std::vector<std::pair<double, bool>> metrics{{3, true}, {1, true}, {0, false}, {1, true}, {not_a_number, true},
                                                     {2, true}};
  CHECK(saved({.keep_last = 2, .keep_best = 1}, metrics) ==
        std::pair(Steps{2, 5, 6}, 2.0));  // of two equal ones the older
  CHECK(saved({.keep_last = 1, .keep_best = 2}, metrics) == std::pair(Steps{2, 4, 6}, 2.0));
  CHECK(saved({.keep_last = 1, .keep_best = 0}, metrics) == std::pair(Steps{6}, 6.0));
  CHECK(saved({.keep_last = 2, .keep_best = 1, .goal = Goal::maximize}, metrics) == std::pair(Steps{1, 5, 6}, 1.0));
  CHECK(saved({.keep_last = 9}, {{not_a_number, true}, {0, false}}) == std::pair(Steps{1, 2}, -1.0));
}

TEST_CASE("restore_best brings back the model only, and passes over a damaged best one") {
  const TemporaryDirectory folder;
  Run run;
  CheckpointManager checkpoints({.directory = folder.path(), .keep_last = 9});
  for (int n = 1; n <= 3; ++n) {
    run.fill(n);
    Progress at = at_step(n);
    at.metric = 10 - n, at.metric_step = n;
    checkpoints.save(at, run.model, run.optimizer);
  }
  run.optimizer.param_groups()[0].options().set_lr(0.7);
  run.fill(0);
  CHECK(checkpoints.restore_best(run.model));
  CHECK(run.is_all(3));
  CHECK(run.optimizer.param_groups()[0].options().get_lr() == 0.7);
  std::string text = read_text(checkpoints.list()[2].path);
  text.back() ^= 1;
  write_text(checkpoints.list()[2].path, text);
  CaughtWarnings warnings;
  CHECK(checkpoints.restore_best(run.model));
  CHECK(run.is_all(2));
  CHECK(warnings.count() == 1);
}

TEST_CASE("due: by epochs, steps and time, never twice for one progress") {
  const TemporaryDirectory folder;
  Run run;
  const auto at = [](std::int64_t epoch, std::int64_t micro_batch, std::int64_t step) {
    return Progress{.epoch = epoch, .micro_batch = micro_batch, .step = step};
  };
  {
    CheckpointManager checkpoints({.directory = folder / "epochs", .every_epochs = 2});
    CHECK_FALSE(checkpoints.due(at(0, 0, 0)));
    CHECK_FALSE(checkpoints.due(at(1, 0, 10)));
    CHECK_FALSE(checkpoints.due(at(2, 3, 23)));
    CHECK(checkpoints.due(at(2, 0, 20)));
    checkpoints.save(at(2, 0, 20), run.model, run.optimizer);
    CHECK_FALSE(checkpoints.due(at(2, 0, 20)));
    CHECK_FALSE(checkpoints.due(at(3, 0, 30)));
    CHECK(checkpoints.due(at(4, 0, 40)));
  }
  {
    CheckpointManager checkpoints({.directory = folder / "steps", .every_epochs = 0, .every_steps = 10});
    CHECK_FALSE(checkpoints.due(at(0, 9, 9)));
    CHECK(checkpoints.due(at(0, 10, 10)));
    checkpoints.save(at(0, 10, 10), run.model, run.optimizer);
    CHECK_FALSE(checkpoints.due(at(0, 10, 10)));
    CHECK_FALSE(checkpoints.due(at(0, 11, 10)));                // a skip
    checkpoints.save(at(0, 15, 15), run.model, run.optimizer);  // out of turn, when interrupted
    CHECK_FALSE(checkpoints.due(at(0, 19, 19)));
    CHECK(checkpoints.due(at(1, 0, 20)));
    CHECK(checkpoints.due(at(1, 4, 24)));  // nobody asked at 20
  }
  {
    FakeClock clock;
    CheckpointManager checkpoints(
        {.directory = folder / "time", .every_epochs = 0, .every_time = std::chrono::minutes(10), .clock = clock});
    CHECK_FALSE(checkpoints.due(at(0, 1, 1)));
    clock.advance(std::chrono::minutes(10));
    CHECK(checkpoints.due(at(0, 2, 2)));
    checkpoints.save(at(0, 2, 2), run.model, run.optimizer);
    CHECK_FALSE(checkpoints.due(at(0, 3, 3)));
    clock.advance(std::chrono::minutes(11));
    CHECK_FALSE(checkpoints.due(at(0, 2, 2)));  // saved already
    CHECK(checkpoints.due(at(0, 3, 3)));
    checkpoints.wait();
    CHECK(checkpoints.restore(run.model, run.optimizer));
    CHECK_FALSE(checkpoints.due(at(0, 3, 3)));
  }
  CheckpointManager resumed({.directory = folder / "steps", .every_epochs = 0, .every_steps = 10});
  CHECK(resumed.restore(run.model, run.optimizer)->step == 15);
  CHECK_FALSE(resumed.due(at(0, 16, 16)));
  CHECK(resumed.due(at(0, 20, 20)));  // where the uninterrupted run saves
}

TEST_CASE("a new run in a used directory is refused, unless it says what it wants") {
  const TemporaryDirectory folder;
  Run run;
  {
    CheckpointManager first({.directory = folder.path(), .keep_last = 2});
    save_step(first, run, 1), save_step(first, run, 2);
  }
  {
    CheckpointManager fresh({.directory = folder.path()});
    CHECK_THAT(error_of([&] { fresh.claim(); }), ContainsSubstring("holds checkpoints of another run"));
    CHECK_THAT(error_of([&] { save_step(fresh, run, 10); }), ContainsSubstring("Trainer::resume()"));
    CHECK(steps_in(fresh) == Steps{1, 2});
    CHECK(fresh.restore(run.model, run.optimizer)->step == 2);  // that is the choice
    save_step(fresh, run, 3);
    fresh.wait();
    CHECK(steps_in(fresh) == Steps{2, 3});
  }
  {
    CheckpointManager read_before({.directory = folder.path(), .keep_last = 2});
    read_before.restore(run.model, run.optimizer);
    {
      CheckpointManager meanwhile({.directory = folder.path(), .keep_last = 2});
      meanwhile.restore(run.model, run.optimizer);
      save_step(meanwhile, run, 4);
    }
    CHECK_THAT(error_of([&] { save_step(read_before, run, 5); }), ContainsSubstring("another run"));
  }
  {
    CheckpointManager append({.directory = folder.path(), .keep_last = 2, .existing = Existing::append});
    save_step(append, run, 5);
    append.wait();
    CHECK(steps_in(append) == Steps{4, 5});
  }
  FailingStorage storage;
  CheckpointManager discard({.directory = folder.path(), .keep_last = 2, .existing = Existing::discard}, storage);
  storage.arm({.at_commit = 1});
  save_step(discard, run, 0);
  CHECK_THROWS(discard.wait());
  CHECK(steps_in(discard) == Steps{4, 5});  // nothing goes before something new is durable
  save_step(discard, run, 1);
  discard.wait();
  CHECK(steps_in(discard) == Steps{1});
}

TEST_CASE("two managers that write into one directory: an error; a moved one goes on") {
  const TemporaryDirectory folder;
  Run run;
  CheckpointManager first({.directory = folder.path()});
  save_step(first, run, 1);
  first.wait();
  CheckpointManager second({.directory = folder.path()});
  CHECK(second.restore(run.model, run.optimizer));  // reading is for everybody
  CHECK_THAT(error_of([&] { save_step(second, run, 2); }), ContainsSubstring("is in use"));

  FailingStorage storage;
  CheckpointManager held({.directory = folder / "moved"}, storage);
  storage.hold();
  save_step(held, run, 1);
  storage.wait_until_held();
  CheckpointManager moved(std::move(held));
  storage.release();
  save_step(moved, run, 2);
  CheckpointManager assigned({.directory = folder / "other"}, storage);
  save_step(assigned, run, 7);
  assigned = std::move(moved);
  save_step(assigned, run, 3);
  assigned.wait();
  CHECK(steps_in(assigned) == Steps{2, 3});
  CheckpointManager other({.directory = folder / "other"});
  CHECK(steps_in(other) == Steps{7});
  CHECK(other.restore(run.model, run.optimizer)->step == 7);
  save_step(other, run, 8);  // the lock went with its manager
}

TEST_CASE("a manager that was moved from is an error to use, not one that saves nothing") {
  const TemporaryDirectory folder;
  Run run;
  CheckpointManager first({.directory = folder.path(), .every_steps = 1});
  CheckpointManager second(std::move(first));
  const std::string moved = "CheckpointManager: this one was moved from";
  CHECK_THAT(error_of([&] { save_step(first, run, 1); }), ContainsSubstring(moved));
  CHECK_THAT(error_of([&] { first.restore(run.model, run.optimizer); }), ContainsSubstring(moved));
  CHECK_THAT(error_of([&] { first.restore_best(run.model); }), ContainsSubstring(moved));
  CHECK_THAT(error_of([&] { static_cast<void>(first.due(at_step(1))); }), ContainsSubstring(moved));
  CHECK_THAT(error_of([&] { first.claim(); }), ContainsSubstring(moved));
  CHECK_THAT(error_of([&] { first.wait(); }), ContainsSubstring(moved));
  CHECK_THAT(error_of([&] { first.reset(); }), ContainsSubstring(moved));
  CHECK_THAT(error_of([&] { first.list(); }), ContainsSubstring(moved));
  save_step(second, run, 1);
  first = std::move(second);
  CHECK(steps_in(first) == Steps{1});
  CheckpointManager off({});
  CheckpointManager off_too(std::move(off));
  CHECK_NOTHROW(save_step(off, run, 2));
}

TEST_CASE("gradients of an unfinished window are in the checkpoint, dense and sparse; else there are none") {
  const TemporaryDirectory folder;
  const auto options = torch::nn::EmbeddingOptions(5, 2).sparse(true);
  torch::nn::Embedding table(options), table2(options);
  Linear head(2, 1), head2(2, 1);
  SGD optimizer(head->parameters(), 0.1), optimizer2(head2->parameters(), 0.1);
  const auto loss = [](auto& t, auto& h) { return h(t(torch::tensor({1, 3, 1}))).pow(2).mean(); };
  GradAccumulator accumulator(3), accumulator2(3);
  CHECK_FALSE(accumulator.backward(loss(table, head)));
  CheckpointManager checkpoints({.directory = folder.path()});
  checkpoints.save({.micro_batch = 1}, table, optimizer, head, accumulator);
  checkpoints.restore(table2, optimizer2, head2, accumulator2);
  CHECK(difference(stored(table2, optimizer2, head2, accumulator2), stored(table, optimizer, head, accumulator)) == "");
  CHECK(table2->weight.grad().is_sparse());
  CHECK(torch::equal(table2->weight.grad().to_dense(), table->weight.grad().to_dense()));

  for (const bool last : {false, true}) {
    CHECK(accumulator.backward(loss(table, head)) == last);
    CHECK(accumulator2.backward(loss(table2, head2)) == last);
  }
  CHECK(torch::equal(table2->weight.grad().to_dense(), table->weight.grad().to_dense()));
  CHECK(torch::equal(head2->weight.grad(), head->weight.grad()));

  accumulator.finish();  // stepped; the gradients are old
  checkpoints.save({.step = 1}, table, optimizer, head, accumulator);
  checkpoints.restore(table2, optimizer2, head2, accumulator2);
  CHECK_FALSE(table2->weight.grad().defined());
  CHECK_FALSE(head2->weight.grad().defined());
}

TEST_CASE("random numbers go on where they were") {
  const TemporaryDirectory folder;
  Run run;
  CheckpointManager checkpoints({.directory = folder.path()});
  torch::manual_seed(5);
  torch::randn({3});  // leaves a normal number in the generator's cache
  checkpoints.save({}, run.model, run.optimizer);
  const auto next = torch::randn({17});
  const auto state = CheckpointManager<>::RandomState::now();
  torch::manual_seed(6);
  checkpoints.restore(run.model, run.optimizer);
  CHECK(torch::equal(torch::randn({17}), next));
  CheckpointManager<>::RandomState().restore();
  const auto later = torch::rand({2});
  state.restore();
  CHECK(torch::equal(torch::rand({2}), later));
}

namespace {

// An optimizer of a user that saves itself.
struct CountingOptions : torch::optim::OptimizerCloneableOptions<CountingOptions> {};
struct Counting : torch::optim::Optimizer {
  explicit Counting(std::vector<at::Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<CountingOptions>()) {}
  at::Tensor step(LossClosure = nullptr) override { return ++steps, at::Tensor(); }
  void save(auto& out) const { out.write("steps", steps); }
  void load(auto& in) { in.read("steps", steps); }
  std::int64_t steps = 0;
};

}  // namespace

TEST_CASE("an optimizer with save(out) and load(in) takes part") {
  const TemporaryDirectory folder;
  Run run;
  Counting optimizer(run.model->parameters()), other(run.model->parameters());
  optimizer.step();
  CheckpointManager checkpoints({.directory = folder.path()});
  checkpoints.save({}, run.model, optimizer);
  checkpoints.restore(run.model, other);
  CHECK(other.steps == 1);
}
