#include "support/catch.hpp"

#include <frugal/batches.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <ranges>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using Indices = std::vector<std::int64_t>;

// Sample i is the number i.
at::Tensor numbered(std::int64_t samples) { return torch::arange(samples, torch::kLong); }

Indices to_vector(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  return {flat.data_ptr<std::int64_t>(), flat.data_ptr<std::int64_t>() + flat.numel()};
}

std::vector<Indices> contents(auto&& range) {
  std::vector<Indices> found;
  for (const auto& batch : range) {
    if constexpr (requires { batch.inputs; }) {
      CHECK(torch::equal(batch.targets, batch.inputs * 10));
      found.push_back(to_vector(batch.inputs));
    } else found.push_back(to_vector(batch));
  }
  return found;
}

auto tensors(std::int64_t samples, frugal::BatchesOptions options) {
  return frugal::Batches(numbered(samples), numbered(samples) * 10, options);
}
auto fetched(std::int64_t samples, frugal::BatchesOptions options) {
  return frugal::Batches(samples, [](at::Tensor indices) { return indices; }, options);
}

Indices joined(const std::vector<Indices>& parts) {
  Indices all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}
Indices sorted(Indices all) {
  std::ranges::sort(all);
  return all;
}
Indices first_numbers(std::int64_t count) {
  Indices all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

struct MovesItself {
  at::Tensor rows;
  std::string name;
  MovesItself to(at::Device device) const { return {rows.to(device), name}; }
};
struct Unknown { at::Tensor rows; };

}  // namespace

using TensorEpoch = decltype(tensors(1, {}).epoch(0));
using FetchEpoch = decltype(fetched(1, {}).epoch(0));
static_assert(std::ranges::input_range<TensorEpoch> && std::ranges::input_range<const FetchEpoch>);
static_assert(std::same_as<std::ranges::range_value_t<TensorEpoch>, frugal::Batch>);
static_assert(std::same_as<std::ranges::range_value_t<FetchEpoch>, at::Tensor>);
static_assert(std::same_as<decltype(tensors(1, {})), frugal::Batches<>>);

TEST_CASE("every sample comes once per epoch", "[batches]") {
  for (std::int64_t samples : {1, 2, 7, 64, 1000}) {
    const auto batches = tensors(samples, {.batch_size = 6, .micro_batch = 4, .seed = 11});
    for (std::int64_t epoch : {0, 1, 99})
      CHECK(sorted(joined(contents(batches.epoch(epoch)))) == first_numbers(samples));
  }
}

TEST_CASE("the order is a function of seed and epoch alone, the same on every platform", "[batches]") {
  const auto order = [](std::uint64_t seed, std::int64_t epoch) {
    return joined(contents(fetched(10, {.batch_size = 3, .seed = seed}).epoch(epoch)));
  };
  // SplitMix64 with seed 0 starts with this number; the orders come from a second implementation, in Python
  CHECK(frugal::detail::Random(0).next() == 0xE220A8397B1DCDAFu);
  CHECK(order(0, 0) == Indices{1, 0, 8, 4, 7, 9, 2, 5, 6, 3});
  CHECK(order(0, 1) == Indices{3, 5, 7, 9, 6, 0, 2, 8, 4, 1});
  CHECK(order(1, 0) == Indices{8, 7, 5, 4, 3, 0, 6, 1, 9, 2});
  CHECK(order(~std::uint64_t{0}, 7) == Indices{2, 7, 9, 3, 6, 0, 1, 4, 5, 8});

  std::set<Indices> orders;
  for (std::uint64_t seed = 0; seed < 20; ++seed)
    for (std::int64_t epoch = 0; epoch < 20; ++epoch)
      orders.insert(joined(contents(fetched(30, {.seed = seed}).epoch(epoch))));
  CHECK(orders.size() == 400);
}

TEST_CASE("the order touches no global generator", "[batches]") {
  torch::manual_seed(3);
  const auto expected = torch::rand({4});
  torch::manual_seed(3);
  contents(tensors(100, {}).epoch(5));
  CHECK(torch::equal(torch::rand({4}), expected));
}

TEST_CASE("no place is favoured", "[batches]") {
  // 5 samples in 24000 epochs: each of the 25 pairs (place, sample) is expected 4800 times, standard deviation 62, and
  // each of the 120 orders 200 times, standard deviation 14
  std::array<std::array<int, 5>, 5> at{};
  std::map<Indices, int> orders;
  Indices order(5);
  for (std::int64_t epoch = 0; epoch < 24000; ++epoch) {
    frugal::detail::shuffle_samples(order, 42, epoch);
    ++orders[order];
    for (std::size_t place = 0; place < 5; ++place) ++at[place][static_cast<std::size_t>(order[place])];
  }
  for (const auto& place : at)
    for (int count : place) CHECK(std::abs(count - 4800) < 5 * 62);
  CHECK(orders.size() == 120);
  for (const auto& [one, count] : orders) CHECK(std::abs(count - 200) < 5 * 14);
}

TEST_CASE("below() is exactly uniform where a remainder would not be", "[batches]") {
  // A remainder of 64 bits modulo 3 * 2^62 would make the first third twice as likely as the others.
  frugal::detail::Random random(1);
  int first_third = 0;
  for (int i = 0; i < 3000; ++i) first_third += random.below(std::uint64_t{3} << 62) < (std::uint64_t{1} << 62);
  CHECK(std::abs(first_third - 1000) < 5 * 26);
  CHECK(random.below(1) == 0);
}

TEST_CASE("sequential batches are the data as it stands, without a copy", "[batches]") {
  const auto images = numbered(10);
  const frugal::Batches batches(images, images * 10, {.batch_size = 4, .order = frugal::Order::sequential});
  CHECK(contents(batches.epoch(0)) == std::vector<Indices>{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}});
  CHECK(contents(batches.epoch(7)) == contents(batches.epoch(0)));
  CHECK((*batches.epoch(0).begin()).inputs.data_ptr() == images.data_ptr());
  CHECK(joined(contents(fetched(10, {.order = frugal::Order::sequential}).epoch(3))) == first_numbers(10));
}

TEST_CASE("an effective batch is cut into equal micro-batches, and none spans two", "[batches]") {
  const auto sizes = [](std::int64_t samples, std::int64_t batch, std::int64_t micro) {
    Indices found;
    const auto batches = tensors(samples, {.batch_size = batch, .micro_batch = micro});
    for (const auto& part : contents(batches.epoch(0))) found.push_back(static_cast<std::int64_t>(part.size()));
    CHECK(static_cast<std::int64_t>(found.size()) == batches.size());
    return found;
  };
  CHECK(sizes(20, 10, 0) == Indices{10, 10});
  CHECK(sizes(20, 10, 4) == Indices{4, 3, 3, 4, 3, 3});
  CHECK(sizes(25, 10, 4) == Indices{4, 3, 3, 4, 3, 3, 3, 2});
  CHECK(sizes(65, 32, 32) == Indices{32, 32, 1});
  CHECK(sizes(9, 9, 4) == Indices{3, 3, 3});  // and not 4, 4, 1
  CHECK(sizes(3, 100, 2) == Indices{2, 1});
  CHECK(sizes(5, 1, 1) == Indices{1, 1, 1, 1, 1});

  const auto sorted_sizes = [&] {
    auto all = sizes(256, 256, 40);
    std::ranges::sort(all);
    return all;
  }();
  CHECK(sorted_sizes == Indices{36, 36, 36, 37, 37, 37, 37});

  for (std::int64_t samples : {1, 17, 100, 101})
    for (std::int64_t batch : {1, 7, 10, 64, 200})
      for (std::int64_t micro = 1; micro <= batch; ++micro) {
        const frugal::detail::Partition partition{samples, batch, micro};
        std::int64_t next = 0;
        for (std::int64_t i = 0; i < partition.size(); ++i) {
          const auto [first, count] = partition.part(i);
          REQUIRE(first == next);
          REQUIRE((count >= 1 && count <= micro));
          REQUIRE(first / batch == (first + count - 1) / batch);
          REQUIRE(first / batch == i / partition.steps());
          next = first + count;
        }
        REQUIRE(next == samples);
      }
}

TEST_CASE("sizes and positions can be asked for", "[batches]") {
  const auto batches = tensors(25, {.batch_size = 10, .micro_batch = 4});
  CHECK(batches.samples() == 25);
  CHECK(batches.batch_size() == 10);
  CHECK(batches.micro_batch() == 4);
  CHECK(batches.steps() == 3);
  CHECK(batches.size() == 8);
  CHECK(tensors(25, {.batch_size = 10}).micro_batch() == 10);

  // the samples of an effective batch are the same ones with micro-batches of another size
  const auto finer = tensors(25, {.batch_size = 10, .micro_batch = 3});
  CHECK(joined(contents(batches.epoch(2, 2 * batches.steps()))) == joined(contents(finer.epoch(2, 2 * finer.steps()))));
  CHECK(batches.fingerprint() == finer.fingerprint());
}

TEST_CASE("iterating from `consumed` yields exactly the rest", "[batches]") {
  const auto check = [](const auto& batches) {
    for (std::int64_t epoch : {0, 3}) {
      const auto whole = contents(batches.epoch(epoch));
      REQUIRE(static_cast<std::int64_t>(whole.size()) == batches.size());
      for (std::int64_t consumed = 0; consumed <= batches.size(); ++consumed)
        CHECK(contents(batches.epoch(epoch, consumed)) == std::vector(whole.begin() + consumed, whole.end()));
    }
    CHECK(batches.epoch(1, batches.size()).begin() == std::default_sentinel);
    CHECK_THROWS_WITH(batches.epoch(1, batches.size() + 1), ContainsSubstring("of epoch 1 does not exist"));
    CHECK_THROWS_WITH(batches.epoch(0, -1), ContainsSubstring("micro-batch -1 of epoch 0 does not exist"));
    CHECK_THROWS_WITH(batches.epoch(-1), ContainsSubstring("epoch -1 does not exist"));
  };
  for (std::int64_t prefetch : {0, 1, 3}) {
    check(tensors(23, {.batch_size = 10, .micro_batch = 4, .prefetch = prefetch}));
    check(fetched(23, {.batch_size = 10, .micro_batch = 4, .prefetch = prefetch}));
  }
}

TEST_CASE("order and contents do not depend on prefetch or on the kind of data", "[batches]") {
  const frugal::BatchesOptions options{.batch_size = 12, .micro_batch = 5, .seed = 9};
  const auto expected = contents(tensors(100, options).epoch(4));
  for (std::int64_t prefetch : {0, 1, 2, 50}) {
    auto changed = options;
    changed.prefetch = prefetch;
    CHECK(contents(tensors(100, changed).epoch(4)) == expected);
    CHECK(contents(fetched(100, changed).epoch(4)) == expected);
  }
}

TEST_CASE("a range can be iterated again, outlives its Batches and works with std::ranges", "[batches]") {
  for (std::int64_t prefetch : {0, 2}) {
    const frugal::BatchesOptions options{.batch_size = 8, .prefetch = prefetch};
    const auto expected = contents(tensors(30, options).epoch(2));
    const auto range = tensors(30, options).epoch(2);
    CHECK(contents(range) == expected);
    CHECK(contents(range) == expected);
    auto iterator = tensors(30, options).epoch(2).begin();
    CHECK(to_vector(iterator->inputs) == expected[0]);
    iterator++;
    CHECK(to_vector((*iterator).inputs) == expected[1]);
    CHECK(contents(fetched(30, options).epoch(2) | std::views::take(2)) ==
          std::vector(expected.begin(), expected.begin() + 2));
    CHECK(std::ranges::distance(fetched(30, options).epoch(2)) == 4);
  }
}

TEST_CASE("ranges can be used side by side", "[batches]") {
  for (std::int64_t prefetch : {0, 2}) {
    const auto batches = tensors(200, {.batch_size = 8, .prefetch = prefetch});
    const auto expected = contents(batches.epoch(1));
    const auto range = batches.epoch(1);
    std::array<std::vector<Indices>, 4> found;
    std::vector<std::thread> threads;
    for (auto& one : found)
      threads.emplace_back([&] {
        for (const auto& batch : range) one.push_back(to_vector(batch.inputs));
      });
    for (auto& thread : threads) thread.join();
    for (const auto& one : found) CHECK(one == expected);
  }
}

TEST_CASE("fetch gets a copy of its indices, and a seed where it asks for one", "[batches]") {
  const frugal::Batches greedy(20, [](at::Tensor indices) { return indices.fill_(7); }, {.batch_size = 5});
  const auto range = greedy.epoch(0);
  contents(range);
  const frugal::Batches same(20, [](at::Tensor indices) { return indices; }, {.batch_size = 5});
  CHECK(contents(same.epoch(0)).size() == 4);
  Indices seen;
  const frugal::Batches spying(20,
                               [&](at::Tensor indices) {
                                 const auto got = to_vector(indices);
                                 seen.insert(seen.end(), got.begin(), got.end());
                                 return indices.fill_(7);
                               },
                               {.batch_size = 5});
  const auto twice = spying.epoch(0);
  contents(twice), contents(twice);
  CHECK(Indices(seen.begin(), seen.begin() + 20) == Indices(seen.begin() + 20, seen.end()));

  const auto seeds = [](frugal::BatchesOptions options, std::int64_t epoch, std::int64_t consumed) {
    const frugal::Batches batches(20, [](const at::Tensor&, std::uint64_t seed) { return seed; }, options);
    std::vector<std::uint64_t> found;
    for (std::uint64_t seed : batches.epoch(epoch, consumed)) found.push_back(seed);
    return found;
  };
  const auto expected = seeds({.batch_size = 5}, 2, 0);
  CHECK(std::set(expected.begin(), expected.end()).size() == 4);
  CHECK(seeds({.batch_size = 5, .prefetch = 2}, 2, 1) == std::vector(expected.begin() + 1, expected.end()));
  CHECK(seeds({.batch_size = 5}, 1, 0) != expected);
  CHECK(seeds({.batch_size = 5, .seed = 1}, 2, 0) != expected);
  CHECK(frugal::detail::seed_of(3, 2, 5) == 7791307767807455806u);  // from a second implementation
}

TEST_CASE("without prefetch nothing is fetched before its turn, and on this thread", "[batches]") {
  const auto here = std::this_thread::get_id();
  for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kMeta)}) {
    std::int64_t calls = 0;
    bool stayed = true;
    const frugal::Batches batches(12,
                                  [&](at::Tensor indices) {
                                    ++calls;
                                    stayed = stayed && std::this_thread::get_id() == here;
                                    return indices;
                                  },
                                  {.batch_size = 4, .device = device});
    std::int64_t used = 0;
    for ([[maybe_unused]] const auto& batch : batches.epoch(0)) CHECK(calls == ++used);
    CHECK(used == 3);
    CHECK(stayed);
  }
}

TEST_CASE("prefetch fetches on one other thread, no further ahead than asked for", "[batches]") {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::atomic<std::int64_t> calls = 0, used = 0, most = 0;
  const frugal::Batches batches(400,
                                [&](at::Tensor indices) {
                                  std::lock_guard lock(mutex);
                                  threads.insert(std::this_thread::get_id());
                                  most = std::max(most.load(), ++calls - used);
                                  return indices;
                                },
                                {.batch_size = 4, .prefetch = 3});
  for (auto at = batches.epoch(0).begin(); at != std::default_sentinel; ++used, ++at)
    while (used == 0 && most < 4) std::this_thread::yield();  // it does run ahead
  CHECK(most == 4);                                           // three and the one in use
  CHECK(threads.size() == 1);
  CHECK_FALSE(threads.contains(std::this_thread::get_id()));
}

TEST_CASE("an exception of fetch comes out at its batch, and a loop can be left at any time", "[batches]") {
  for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kMeta)})
    for (std::int64_t prefetch : {0, 1, 4}) {
      const auto alive = std::make_shared<int>();
      {
        std::atomic<int> calls = 0;
        const frugal::Batches batches(50,
                                      [&calls, alive](at::Tensor indices) {
                                        if (++calls == 4) throw std::runtime_error("file 3 is damaged");
                                        return indices;
                                      },
                                      {.batch_size = 5, .device = device, .prefetch = prefetch});
        int used = 0;
        CHECK_THROWS_WITH(
            [&] {
              for ([[maybe_unused]] const auto& batch : batches.epoch(0)) ++used;
            }(),
            "file 3 is damaged");
        CHECK(used == 3);
        for ([[maybe_unused]] const auto& batch : batches.epoch(0)) break;
        auto unfinished = batches.epoch(1).begin();
        ++unfinished;
      }
      CHECK(alive.use_count() == 1);
    }
}

TEST_CASE("batches are on the device, whatever they are made of", "[batches]") {
  const auto on_meta = [](auto make) {
    const frugal::Batches batches(4, [make](at::Tensor indices) { return make(indices.to(at::kFloat)); },
                                  {.batch_size = 2, .device = at::kMeta});
    return std::move(*batches.epoch(0).begin());
  };
  const auto moved = [](const at::Tensor& tensor) { return tensor.is_meta() && tensor.size(0) == 2; };
  using at::Tensor;

  CHECK(moved(on_meta([](Tensor x) { return x; })));
  const auto batch = on_meta([](Tensor x) { return frugal::Batch{x, x}; });
  CHECK((moved(batch.inputs) && moved(batch.targets)));
  const auto pair = on_meta([](Tensor x) { return std::pair(x, 5); });
  CHECK((moved(pair.first) && pair.second == 5));
  const auto tuple = on_meta([](Tensor x) { return std::tuple(x, std::string("name"), std::vector{x, x}); });
  CHECK((moved(std::get<0>(tuple)) && std::get<1>(tuple) == "name" && moved(std::get<2>(tuple)[1])));
  const auto array = on_meta([](Tensor x) { return std::array{x, x}; });
  CHECK(moved(array[1]));
  const auto map = on_meta([](Tensor x) { return std::map<std::string, Tensor>{{"tokens", x}, {"mask", x}}; });
  CHECK((moved(map.at("tokens")) && moved(map.at("mask"))));
  const auto optional = on_meta([](Tensor x) { return std::pair(std::optional(x), std::optional<Tensor>()); });
  CHECK((moved(*optional.first) && !optional.second));
  const auto undefined = on_meta([](Tensor x) { return frugal::Batch{x, Tensor()}; });
  CHECK((moved(undefined.inputs) && !undefined.targets.defined()));
  const auto example = on_meta([](Tensor x) { return torch::data::Example<>(x, x); });
  CHECK((moved(example.data) && moved(example.target)));
  const auto examples = on_meta([](Tensor x) { return std::vector{torch::data::TensorExample(x)}; });
  CHECK(moved(examples[0].data));
  const auto itself = on_meta([](Tensor x) { return MovesItself{x, "kept"}; });
  CHECK((moved(itself.rows) && itself.name == "kept"));
  CHECK(on_meta([](Tensor x) { return Unknown{x}; }).rows.is_cpu());
  CHECK(on_meta([](Tensor) { return std::string("text"); }) == "text");
  CHECK(*on_meta([](Tensor) { return std::make_unique<int>(3); }) == 3);
}

TEST_CASE("batches of tensors are on the device, with every prefetch", "[batches]") {
  for (std::int64_t prefetch : {0, 2}) {
    const auto batches = tensors(10, {.batch_size = 4, .device = at::kMeta, .prefetch = prefetch});
    std::vector<std::int64_t> sizes;
    for (const auto& batch : batches.epoch(0)) {
      CHECK((batch.inputs.is_meta() && batch.targets.is_meta()));
      sizes.push_back(batch.size());
    }
    CHECK(sizes == Indices{4, 4, 2});
    for ([[maybe_unused]] const auto& batch : batches.epoch(0)) break;
  }
}

TEST_CASE("tensors on a device are gathered by the thread that uses them", "[batches]") {
  using Source = frugal::detail::BatchSource<frugal::detail::FromTensors>;
  const auto here = numbered(4), there = here.to(at::kMeta);
  CHECK(Source(4, {here, here}, {.prefetch = 2}).prefetch() == 2);
  CHECK(Source(4, {there, here}, {.prefetch = 2}).prefetch() == 0);
  CHECK(Source(4, {here, there}, {.prefetch = 2}).prefetch() == 0);
  const frugal::Batches batches(
      there, there, {.batch_size = 2, .order = frugal::Order::sequential, .device = at::kMeta, .prefetch = 2});
  for (const auto& batch : batches.epoch(0)) CHECK(batch.inputs.is_meta());
}

TEST_CASE("fetch may keep state and need not be copyable", "[batches]") {
  frugal::Batches batches(6, [count = std::make_unique<int>(0)](at::Tensor) mutable { return ++*count; },
                          {.batch_size = 2});
  std::vector<int> found;
  for (int number : batches.epoch(0)) found.push_back(number);
  const auto copy = batches;  // shares it
  for (int number : copy.epoch(1)) found.push_back(number);
  CHECK(found == std::vector{1, 2, 3, 4, 5, 6});
}

TEST_CASE("the fingerprint tells apart what a position depends on", "[batches]") {
  std::set<std::string> found;
  for (std::int64_t samples : {20, 21})
    for (std::int64_t batch : {4, 5})
      for (std::uint64_t seed : {0u, 1u})
        for (auto order : {frugal::Order::shuffled, frugal::Order::sequential})
          found.insert(tensors(samples, {.batch_size = batch, .order = order, .seed = seed}).fingerprint());
  CHECK(found.size() == 16);
  CHECK(found.contains("20 samples, batch_size 4, seed 1, shuffled"));
  CHECK(tensors(20, {.batch_size = 4, .micro_batch = 2, .device = at::kMeta, .prefetch = 3}).fingerprint() ==
        fetched(20, {.batch_size = 4}).fingerprint());
}

TEST_CASE("what cannot work is an error that says what to do", "[batches]") {
  const auto images = numbered(10);
  CHECK_THROWS_WITH(frugal::Batches(images, numbered(9)), ContainsSubstring("10 inputs and 9 targets"));
  CHECK_THROWS_WITH(frugal::Batches(numbered(0), numbered(0)), ContainsSubstring("there are 0 samples"));
  CHECK_THROWS_WITH(frugal::Batches(images, at::Tensor()), ContainsSubstring("need a first dimension"));
  CHECK_THROWS_WITH(frugal::Batches(torch::tensor(1), torch::tensor(1)), ContainsSubstring("need a first dimension"));
  CHECK_THROWS_WITH(fetched(-3, {}), ContainsSubstring("there are -3 samples"));
  CHECK_THROWS_WITH(tensors(10, {.batch_size = 0}), ContainsSubstring("batch_size is 0"));
  CHECK_THROWS_WITH(tensors(10, {.micro_batch = -1}), ContainsSubstring("micro_batch is -1"));
  CHECK_THROWS_WITH(tensors(10, {.batch_size = 8, .micro_batch = 9}),
                    ContainsSubstring("micro_batch is 9, batch_size 8"));
  CHECK_THROWS_WITH(tensors(10, {.prefetch = -1}), ContainsSubstring("prefetch is -1"));
  CHECK_THROWS_AS(tensors(10, {.batch_size = 0}), c10::Error);
}
