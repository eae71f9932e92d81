#pragma once

#include <frugal/detail/channels_last.hpp>
#include <frugal/detail/device_copy.hpp>
#include <frugal/detail/epoch_range.hpp>
#include <frugal/detail/sample_order.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

namespace frugal::inline v0 {

/// What Batches of two tensors yields: samples along the first dimension of both.
struct Batch {
  at::Tensor inputs;
  at::Tensor targets;
  /// Samples in it.
  std::int64_t size() const { return inputs.size(0); }
};

/// shuffled: a new random order in every epoch. sequential: as they are.
enum class Order { shuffled, sequential };

struct BatchesOptions {
  std::int64_t batch_size = 32;  ///< samples behind one optimizer step: the effective batch
  std::int64_t micro_batch = 0;  ///< samples at once, at most; 0: the whole effective batch
  Order order = Order::shuffled;
  std::uint64_t seed = 0;        ///< of the order
  at::Device device = at::kCPU;  ///< where the batches are when they are yielded
  std::int64_t prefetch = 0;     ///< batches fetched ahead on a background thread; 0: no thread
};

namespace detail {

// The fetch function of data that is in memory.
struct FromTensors {
  at::Tensor inputs, targets;

  Batch operator()(const at::Tensor& order, Partition::Part part, at::Device device) const {
    return {gather(inputs, order, part.first, part.count, device),
            gather(targets, order, part.first, part.count, device)};
  }
};

// Whether a fetch function takes a batch's indices, or the indices and a seed, and gives something back.
template <class Fetch>
concept FetchesByIndex =
    std::invocable<Fetch&, at::Tensor> && !std::is_void_v<std::invoke_result_t<Fetch&, at::Tensor>>;
template <class Fetch>
concept FetchesBySeed = std::invocable<Fetch&, at::Tensor, std::uint64_t> &&
                        !std::is_void_v<std::invoke_result_t<Fetch&, at::Tensor, std::uint64_t>>;

template <class Fetch>
auto fetched(Fetch& fetch, at::Tensor indices, std::uint64_t seed) {
  if constexpr (FetchesByIndex<Fetch>) return fetch(std::move(indices));
  else if constexpr (FetchesBySeed<Fetch>) return fetch(std::move(indices), seed);
  else return Batch{};  // Batches has said by now what is wrong
}

// What micro-batch i of an epoch holds. Shared by a Batches and all of its ranges.
template <class Fetch>
class BatchSource {
 public:
  // A batch of tensors is the same whenever it is made; a fetch function may draw random numbers, so it has its turn.
  static constexpr bool draws_ahead = std::same_as<Fetch, FromTensors>;
  using Item = decltype(fetched(std::declval<Fetch&>(), at::Tensor(), std::uint64_t{}));

  BatchSource(std::int64_t samples, Fetch fetch, BatchesOptions options) : fetch_(std::move(fetch)), options_(options) {
    TORCH_CHECK(samples > 0, "Batches: there are ", samples, " samples. Pass at least one.");
    TORCH_CHECK(options.batch_size > 0, "Batches: batch_size is ", options.batch_size, ". Use at least 1.");
    TORCH_CHECK(options.micro_batch >= 0 && options.micro_batch <= options.batch_size, "Batches: micro_batch is ",
                options.micro_batch, ", batch_size ", options.batch_size,
                ". A micro-batch is a part of a batch; 0 means all of it.");
    TORCH_CHECK(options.prefetch >= 0, "Batches: prefetch is ", options.prefetch, ". Use 0 for no background thread.");
    if (options_.micro_batch == 0) options_.micro_batch = options_.batch_size;
    partition_ = {samples, options_.batch_size, options_.micro_batch};
  }

  // The order of an epoch, where the data is; undefined for tensors in sequence, which are narrowed. 8 bytes per
  // sample.
  at::Tensor order(std::int64_t epoch) const {
    const bool shuffled = options_.order == Order::shuffled;
    if (draws_ahead && !shuffled) return {};
    at::Tensor order = at::empty({partition_.samples}, at::kLong);
    const std::span all(order.mutable_data_ptr<std::int64_t>(), static_cast<std::size_t>(partition_.samples));
    if (shuffled) shuffle_samples(all, options_.seed, epoch);
    else std::iota(all.begin(), all.end(), std::int64_t{0});
    if constexpr (draws_ahead) {
      if (has_copy_engine(fetch_.inputs.device())) order = order.pin_memory();
      order = order.to(fetch_.inputs.device(), /*non_blocking=*/!fetch_.inputs.device().is_cpu());
    }
    return order;
  }

  Item make(std::int64_t epoch, const at::Tensor& order, std::int64_t i) {
    const Partition::Part part = partition_.part(i);
    Item batch = [&] {
      if constexpr (draws_ahead) return fetch_(order, part, options_.device);
      else  // a copy: what fetch does to its indices stays its own
        return fetched(fetch_, order.narrow(0, part.first, part.count).clone(),
                       seed_of(options_.seed, epoch, part.first));
    }();
    if (channels_last_) order_channels_last(batch);
    if (has_copy_engine(options_.device)) pin(batch);
    return batch;
  }

  // Tensors once, so that gathering keeps the order; what is fetched, batch by batch.
  void to_channels_last() {
    if constexpr (draws_ahead) order_channels_last(fetch_);
    else channels_last_ = true;
  }

  std::int64_t size() const { return partition_.size(); }
  at::Device device() const { return options_.device; }
  // Tensors on a device stay with the caller: another thread would gather them on another stream.
  std::int64_t prefetch() const {
    if constexpr (draws_ahead)
      if (!fetch_.inputs.device().is_cpu() || !fetch_.targets.device().is_cpu()) return 0;
    return options_.prefetch;
  }
  const BatchesOptions& options() const { return options_; }
  const Partition& partition() const { return partition_; }

 private:
  Fetch fetch_;
  BatchesOptions options_;
  Partition partition_{};
  bool channels_last_ = false;
};

}  // namespace detail

/// Mini-batches whose order is a pure function of (seed, epoch), so that training resumes at any of them: of two
/// tensors in memory, or of anything that a function fetches by index.
///
///     frugal::Batches batches(images, labels, {.batch_size = 256, .micro_batch = 64, .device = device});
///     for (std::int64_t epoch = 0; epoch < epochs; ++epoch)
///       for (auto& batch : batches.epoch(epoch)) train(batch.inputs, batch.targets);
///
///     frugal::Batches files(count, [&](at::Tensor indices) { return load(indices); }, {.prefetch = 2});
///
/// Every sample comes once per epoch, in an order that is the same on every platform; no global generator is touched.
/// An effective batch is cut into micro-batches whose sizes differ by at most one sample, and so is the shorter one at
/// the end of an epoch: with `GradAccumulator(batches.steps())` no window spans two effective batches.
///
/// *Tensors.* Shuffled batches are copies, sequential ones views of the data: do not change those in place. Images in
/// channels-last order stay so (channels_last.hpp). Where the device is not the CPU, the next batch is on its way while
/// one is used; on CUDA from pinned memory and on a stream of its own (not yet run on a GPU). Data that fits on the
/// device is best put there once.
///
/// *Fetch.* `fetch(at::Tensor indices)` gets int64 indices on the CPU and returns the batch: a Batch, a tensor, a
/// struct of your own. Tensors in pairs, tuples, ranges, optionals, Example<> and Batch go to the device, parts with
/// `to(at::Device)` by that, and all else stays. What is random (augmentation) should come from a second argument:
/// `fetch(indices, std::uint64_t seed)` gets a number of its own for every batch, so that neither a resume nor
/// `prefetch` changes a bit. Draws from a global generator are that exact only without `prefetch`, where nothing is
/// fetched before its turn.
///
/// *prefetch = n* fetches up to n batches ahead on one background thread per running loop; a batch that is fetched by
/// the time the loop takes the one before it is on its way to the device from then on. Order and results are those of
/// `prefetch = 0`. The thread has default thread-local settings (gradients enabled, no autocast); return tensors on the
/// CPU there. An exception of `fetch` comes out of the loop at the batch that it belongs to. Leaving a loop early waits
/// for the fetch that runs. For tensors it moves the gathering of samples on the CPU to that thread.
///
/// Cheap to copy, and safe to use from several threads if `fetch` is: ranges share the data and the function.
template <class Fetch = detail::FromTensors>
class Batches {
  static_assert(std::same_as<Fetch, detail::FromTensors> || detail::FetchesByIndex<Fetch> ||
                    detail::FetchesBySeed<Fetch>,
                "Batches: the fetch function does not fit. Write `fetch(at::Tensor indices)` that returns a batch, or "
                "`fetch(at::Tensor indices, std::uint64_t seed)`.");

 public:
  /// Batches of the first dimension of two tensors, which are shared, not copied. Throws c10::Error when they differ in
  /// length or are empty, and on an option outside of its range.
  Batches(at::Tensor inputs, at::Tensor targets, BatchesOptions options = {})
    requires std::same_as<Fetch, detail::FromTensors>
      : source_(from_tensors(std::move(inputs), std::move(targets), options)) {}

  /// Batches of `samples` samples that `fetch` returns by index. Throws c10::Error on no samples and on an option
  /// outside of its range.
  Batches(std::int64_t samples, Fetch fetch, BatchesOptions options = {})
    requires(!std::same_as<Fetch, detail::FromTensors>)
      : source_(std::make_shared<Source>(samples, std::move(fetch), options)) {}

  /// The micro-batches of an epoch from number `consumed` on: exactly what the whole epoch yields after `consumed` of
  /// them; none when it is size(). An input range that may be iterated again and outlives this object. Makes the order:
  /// 8 bytes per sample. Throws c10::Error on a position that does not exist.
  auto epoch(std::int64_t epoch, std::int64_t consumed = 0) const {
    TORCH_CHECK(epoch >= 0 && consumed >= 0 && consumed <= size(), "Batches: micro-batch ", consumed, " of epoch ",
                epoch, " does not exist. Epochs count from 0, and one has ", size(), " micro-batches.");
    return detail::EpochRange<Source>(source_, source_->order(epoch), epoch, consumed);
  }

  /// Micro-batches in one epoch.
  std::int64_t size() const { return source_->size(); }
  /// Samples in one epoch.
  std::int64_t samples() const { return source_->partition().samples; }
  /// Samples in an effective batch.
  std::int64_t batch_size() const { return source_->options().batch_size; }
  /// Samples in a micro-batch, at most.
  std::int64_t micro_batch() const { return source_->options().micro_batch; }
  /// Micro-batches in a whole effective batch; effective batch k starts at micro-batch `k * steps()`.
  std::int64_t steps() const { return source_->partition().steps(); }

  /// Images and volumes of this object and its copies come in channels-last order from now on; the fingerprint stays.
  /// The function of that name (channels_last.hpp) calls this. Not while a loop over them runs.
  void to_channels_last() { source_->to_channels_last(); }

  /// Which sample belongs to which effective batch: equal fingerprints, equal epochs. micro_batch() is not in it, so
  /// that a run can go on with smaller micro-batches at the start of any effective batch.
  std::string fingerprint() const {
    const BatchesOptions& options = source_->options();
    return std::to_string(samples()) + " samples, batch_size " + std::to_string(options.batch_size) + ", seed " +
           std::to_string(options.seed) + (options.order == Order::shuffled ? ", shuffled" : ", sequential");
  }

 private:
  using Source = detail::BatchSource<Fetch>;

  static std::shared_ptr<Source> from_tensors(at::Tensor inputs, at::Tensor targets, BatchesOptions options) {
    TORCH_CHECK(inputs.defined() && targets.defined() && inputs.dim() > 0 && targets.dim() > 0,
                "Batches: inputs and targets need a first dimension. Stack the samples along it.");
    TORCH_CHECK(inputs.size(0) == targets.size(0), "Batches: there are ", inputs.size(0), " inputs and ",
                targets.size(0), " targets. Pass one target per input.");
    const std::int64_t samples = inputs.size(0);
    return std::make_shared<Source>(samples, detail::FromTensors{std::move(inputs), std::move(targets)}, options);
  }

  std::shared_ptr<Source> source_;
};
Batches(at::Tensor, at::Tensor, BatchesOptions = {}) -> Batches<>;
template <class Fetch>
Batches(std::int64_t, Fetch, BatchesOptions = {}) -> Batches<Fetch>;

}  // namespace frugal::inline v0
