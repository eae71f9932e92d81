#pragma once

#include <frugal/detail/device_copy.hpp>
#include <frugal/detail/prefetcher.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>

// The rest of one epoch as an input range. `Source` makes micro-batch i of an epoch: it has `Item`, `size()`,
// `device()`, `prefetch()`, `make(epoch, order, i)` and `draws_ahead`.
namespace frugal::inline v0::detail {

// One pass over the rest of an epoch: the batch in use, the one on its way to the device, the thread that fetches.
template <class Source>
class Walk {
 public:
  using Item = typename Source::Item;

  Walk(std::shared_ptr<Source> source, at::Tensor order, std::int64_t epoch, std::int64_t first)
      : source_(std::move(source)), order_(std::move(order)), epoch_(epoch), next_(first), copy_(source_->device()) {
    if (source_->prefetch() > 0)
      worker_.emplace(
          next_, source_->size(), source_->prefetch(),
          [&source = *source_, order = order_, epoch](std::int64_t i) { return source.make(epoch, order, i); });
    advance();
  }

  void advance() {
    now_.reset();  // before the next one is made: its memory is free for it
    if (!copy_.under_way()) start_copy(worker_ ? worker_->take() : make());
    if (!copy_.under_way()) return;
    now_.emplace(copy_.finish());
    if (source_->device().is_cpu()) return;  // nothing to copy: a batch ahead would only cost memory
    if (worker_) start_copy(worker_->try_take());
    else if constexpr (Source::draws_ahead) start_copy(make());
  }

  std::optional<Item>& now() { return now_; }

 private:
  std::optional<Item> make() {
    if (next_ == source_->size()) return std::nullopt;
    return source_->make(epoch_, order_, next_++);
  }
  void start_copy(std::optional<Item> batch) {
    if (batch) copy_.start(std::move(*batch));
  }

  std::shared_ptr<Source> source_;
  at::Tensor order_;
  std::int64_t epoch_, next_;
  DeviceCopy<Item> copy_;
  std::optional<Item> now_;
  std::optional<Prefetcher<Item>> worker_;  // last: its thread is joined before anything that it uses is gone
};

template <class Source>
class EpochRange {
 public:
  EpochRange(std::shared_ptr<Source> source, at::Tensor order, std::int64_t epoch, std::int64_t first)
      : source_(std::move(source)), order_(std::move(order)), epoch_(epoch), first_(first) {}

  // Copies share their position, as input iterators do.
  class Iterator {
   public:
    using iterator_concept = std::input_iterator_tag;
    using iterator_category = std::input_iterator_tag;
    using value_type = typename Source::Item;
    using difference_type = std::ptrdiff_t;
    using reference = value_type&;
    using pointer = value_type*;

    Iterator() = default;
    explicit Iterator(std::shared_ptr<Walk<Source>> walk) : walk_(std::move(walk)) {}

    reference operator*() const { return *walk_->now(); }
    pointer operator->() const { return &*walk_->now(); }
    Iterator& operator++() {
      walk_->advance();
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& at, std::default_sentinel_t) { return !at.walk_ || !at.walk_->now(); }

   private:
    std::shared_ptr<Walk<Source>> walk_;
  };

  Iterator begin() const { return Iterator(std::make_shared<Walk<Source>>(source_, order_, epoch_, first_)); }
  static std::default_sentinel_t end() { return {}; }

 private:
  std::shared_ptr<Source> source_;
  at::Tensor order_;
  std::int64_t epoch_, first_;
};

}  // namespace frugal::inline v0::detail
