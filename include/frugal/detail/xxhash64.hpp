#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace frugal::inline v0::detail {

static_assert(std::endian::native == std::endian::little, "frugal writes files in the order of bytes of this machine");

// XXH64 with seed 0, from its specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), fed in pieces. It finds
// accidents: flipped bits, truncation, blocks in the wrong place. It is no signature. Runs at memory speed on one
// thread.
class Xxhash64 {
 public:
  void update(std::span<const std::byte> bytes) {
    length_ += bytes.size();
    if (const std::size_t missing = block_size - held_; held_ != 0 && bytes.size() >= missing) {
      std::memcpy(held_bytes_ + held_, bytes.data(), missing);
      bytes = bytes.subspan(missing);
      held_ = 0;
      blocks(held_bytes_, 1);
    }
    if (held_ == 0) {
      const std::size_t whole = bytes.size() / block_size;
      blocks(bytes.data(), whole);
      bytes = bytes.subspan(whole * block_size);
    }
    if (!bytes.empty()) std::memcpy(held_bytes_ + held_, bytes.data(), bytes.size());
    held_ += bytes.size();
  }

  // The hash of everything so far.
  std::uint64_t value() const {
    std::uint64_t hash = p5;
    if (length_ >= block_size) {
      hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) + std::rotl(lanes_[3], 18);
      for (const std::uint64_t lane : lanes_) hash = (hash ^ round(0, lane)) * p1 + p4;
    }
    hash += length_;
    const std::byte* at = held_bytes_;
    const std::byte* const end = held_bytes_ + held_;
    for (; end - at >= 8; at += 8) hash = std::rotl(hash ^ round(0, load<std::uint64_t>(at)), 27) * p1 + p4;
    for (; end - at >= 4; at += 4) hash = std::rotl(hash ^ (load<std::uint32_t>(at) * p1), 23) * p2 + p3;
    for (; at != end; ++at) hash = std::rotl(hash ^ (std::to_integer<std::uint64_t>(*at) * p5), 11) * p1;
    hash = (hash ^ (hash >> 33)) * p2;
    hash = (hash ^ (hash >> 29)) * p3;
    return hash ^ (hash >> 32);
  }

 private:
  static constexpr std::uint64_t p1 = 0x9E3779B185EBCA87, p2 = 0xC2B2AE3D27D4EB4F, p3 = 0x165667B19E3779F9,
                                 p4 = 0x85EBCA77C2B2AE63, p5 = 0x27D4EB2F165667C5;
  static constexpr std::size_t block_size = 32;

  static constexpr std::uint64_t round(std::uint64_t lane, std::uint64_t word) {
    return std::rotl(lane + word * p2, 31) * p1;
  }
  template <class Word>
  static std::uint64_t load(const std::byte* at) {
    Word word;
    std::memcpy(&word, at, sizeof word);
    return word;
  }

  void blocks(const std::byte* at, std::size_t count) {
    std::uint64_t a = lanes_[0], b = lanes_[1], c = lanes_[2], d = lanes_[3];  // in registers: a third of the time
    for (; count != 0; --count, at += block_size) {
      a = round(a, load<std::uint64_t>(at));
      b = round(b, load<std::uint64_t>(at + 8));
      c = round(c, load<std::uint64_t>(at + 16));
      d = round(d, load<std::uint64_t>(at + 24));
    }
    lanes_[0] = a, lanes_[1] = b, lanes_[2] = c, lanes_[3] = d;
  }

  std::uint64_t lanes_[4] = {p1 + p2, p2, 0, 0 - p1};
  std::uint64_t length_ = 0;
  std::size_t held_ = 0;  // bytes of an unfinished block
  std::byte held_bytes_[block_size] = {};
};

inline std::uint64_t xxhash64(std::span<const std::byte> bytes) {
  Xxhash64 hash;
  hash.update(bytes);
  return hash.value();
}

}  // namespace frugal::inline v0::detail
