#include "support/catch.hpp"

#include <frugal/detail/xxhash64.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using frugal::detail::xxhash64;
using frugal::detail::Xxhash64;

std::uint64_t of(std::string_view text) { return xxhash64(std::as_bytes(std::span(text))); }

// The bytes that the reference implementation checks itself with.
std::vector<std::byte> reference_bytes(std::size_t size) {
  std::vector<std::byte> bytes;
  std::uint64_t state = 2654435761;
  for (; bytes.size() < size; state *= 11400714785074694797u) bytes.push_back(static_cast<std::byte>(state >> 56));
  return bytes;
}

}  // namespace

TEST_CASE("XXH64 gives the published values", "[xxhash64]") {
  CHECK(of("") == 0xef46db3751d8e999);
  CHECK(of("a") == 0xd24ec4f1a98c6e5b);
  CHECK(of("abc") == 0x44bc2cf5ad770999);
  CHECK(of("Nobody inspects the spammish repetition") == 0xfbcea83c8a378bf1);
  const auto bytes = reference_bytes(2243);
  const std::vector<std::pair<std::size_t, std::uint64_t>> published{{1, 0xe934a84adb052768},
                                                                     {4, 0x9136a0dca57457ee},
                                                                     {14, 0x8282dcc4994e35c8},
                                                                     {222, 0xb641ae8cb691c174},
                                                                     {2243, 0x6580659b3a2fd03d}};
  for (const auto& [size, hash] : published) CHECK(xxhash64(std::span(bytes).first(size)) == hash);
}

TEST_CASE("XXH64 in pieces is XXH64 at once", "[xxhash64]") {
  const auto bytes = reference_bytes(300);
  for (std::size_t size = 0; size <= bytes.size(); ++size) {
    const auto all = std::span(bytes).first(size);
    for (std::size_t piece : {1u, 5u, 31u, 32u, 33u, 64u, 100u}) {
      Xxhash64 hash;
      for (std::size_t at = 0; at < size; at += piece) hash.update(all.subspan(at, std::min(piece, size - at)));
      CHECK(hash.value() == xxhash64(all));
      CHECK(hash.value() == xxhash64(all));  // asking changes nothing
    }
  }
}

TEST_CASE("every flipped bit and every cut changes XXH64", "[xxhash64]") {
  auto bytes = reference_bytes(100);
  const std::uint64_t whole = xxhash64(bytes);
  for (std::byte& byte : bytes)
    for (unsigned bit = 0; bit < 8; ++bit) {
      byte ^= std::byte{1} << bit;
      CHECK(xxhash64(bytes) != whole);
      byte ^= std::byte{1} << bit;
    }
  for (std::size_t size = 0; size < bytes.size(); ++size) CHECK(xxhash64(std::span(bytes).first(size)) != whole);
}
