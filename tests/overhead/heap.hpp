#pragma once

#include <sys/mman.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

// A heap for the whole process, libraries included, that counts its calls and in which every call costs the same:
// blocks are powers of two and come from one stack per size. With the system's heap two runs of one loop differ by
// tenths of a percent, and a difference between two loops drowns in that. Include it in one translation unit of a
// program.
namespace overhead {

class Heap {
 public:
  static constexpr std::size_t line = 64;  // every block is aligned to this much

  void* take(std::size_t size, std::size_t alignment = line) {
    if (alignment > line) return take_aligned(size, alignment);
    const Lock lock(busy_);
    ++taken_;
    const std::size_t kind = kind_of(size);
    Block*& top = free_[kind];
    if (!top) top = carve(line + (std::size_t{1} << kind));
    if (!top) return nullptr;
    Block* const block = top;
    top = block->next;
    block->kind = kind;
    block->start = block;
    return reinterpret_cast<std::byte*>(block) + line;
  }
  void give(void* payload) {
    if (!payload) return;
    const Lock lock(busy_);
    Block* const block = header(payload)->start;
    block->next = free_[block->kind];
    free_[block->kind] = block;
  }
  // Bytes that fit behind `payload`.
  static std::size_t room(void* payload) {
    Block* const block = header(payload)->start;
    const std::byte* const end = reinterpret_cast<std::byte*>(block) + line + (std::size_t{1} << block->kind);
    return static_cast<std::size_t>(end - static_cast<std::byte*>(payload));
  }
  std::int64_t taken() const { return taken_; }

 private:
  struct Block {
    Block* start;  // differs from the block itself where more alignment was asked for
    Block* next;
    std::size_t kind;  // 2^kind bytes follow the header
  };
  static_assert(sizeof(Block) <= line);
  struct Lock {
    std::atomic_flag& busy;
    explicit Lock(std::atomic_flag& flag) : busy(flag) {
      while (busy.test_and_set(std::memory_order_acquire)) {}
    }
    ~Lock() { busy.clear(std::memory_order_release); }
  };

  static Block* header(void* payload) { return reinterpret_cast<Block*>(static_cast<std::byte*>(payload) - line); }
  static std::size_t kind_of(std::size_t size) {
    return size <= line ? 6 : static_cast<std::size_t>(std::bit_width(size - 1));
  }

  void* take_aligned(std::size_t size, std::size_t alignment) {
    void* const payload = take(size + alignment + line);
    if (!payload) return nullptr;
    const auto address = reinterpret_cast<std::uintptr_t>(payload) + line;
    auto* const aligned = reinterpret_cast<std::byte*>((address + alignment - 1) / alignment * alignment);
    header(aligned)->start = header(payload);
    return aligned;
  }
  // New memory, from the system in large pieces; never given back.
  Block* carve(std::size_t bytes) {
    if (bytes > left_) {
      constexpr std::size_t piece = std::size_t{64} << 20;
      const std::size_t more = bytes > piece ? (bytes + 4095) / 4096 * 4096 : piece;
      void* const memory =
          mmap(nullptr, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) return nullptr;
      rest_ = static_cast<std::byte*>(memory), left_ = more;
    }
    auto* const block = new (rest_) Block{};
    rest_ += bytes, left_ -= bytes;
    return block;
  }

  std::atomic_flag busy_;
  std::int64_t taken_ = 0;
  Block* free_[64] = {};
  std::byte* rest_ = nullptr;
  std::size_t left_ = 0;
};

inline constinit Heap heap;

}  // namespace overhead

extern "C" {
void* malloc(std::size_t size) noexcept { return overhead::heap.take(size); }
void free(void* block) noexcept { overhead::heap.give(block); }
void* calloc(std::size_t count, std::size_t size) noexcept {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(count, size, &bytes)) return nullptr;
  void* const block = overhead::heap.take(bytes);
  return block ? std::memset(block, 0, bytes) : nullptr;
}
void* realloc(void* block, std::size_t size) noexcept {
  if (!block) return overhead::heap.take(size);
  const std::size_t room = overhead::Heap::room(block);
  if (size <= room) return block;
  void* const larger = overhead::heap.take(size);
  if (!larger) return nullptr;
  std::memcpy(larger, block, room);
  overhead::heap.give(block);
  return larger;
}
void* memalign(std::size_t alignment, std::size_t size) noexcept { return overhead::heap.take(size, alignment); }
void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept { return overhead::heap.take(size, alignment); }
int posix_memalign(void** block, std::size_t alignment, std::size_t size) noexcept {
  void* const taken = overhead::heap.take(size, alignment);
  if (!taken) return ENOMEM;
  *block = taken;
  return 0;
}
void* valloc(std::size_t size) noexcept { return overhead::heap.take(size, 4096); }
void* pvalloc(std::size_t size) noexcept { return overhead::heap.take((size + 4095) / 4096 * 4096, 4096); }
std::size_t malloc_usable_size(void* block) noexcept { return block ? overhead::Heap::room(block) : 0; }
}
