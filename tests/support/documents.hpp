#pragma once

#include <frugal/detail/safetensors.hpp>
#include <frugal/detail/storage_local.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// A document that owns its bytes.
class OwnedDocument {
 public:
  template <class Value>
  void add(std::string name, std::string dtype, std::vector<std::int64_t> shape, const std::vector<Value>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    memory_.emplace_back(bytes.begin(), bytes.end());
    document.tensors.push_back({std::move(name), std::move(dtype), std::move(shape), memory_.back()});
  }

  frugal::detail::Document document;

 private:
  std::deque<std::vector<std::byte>> memory_;
};

/// Every kind of thing that a header can hold, in few bytes.
inline OwnedDocument small_document() {
  OwnedDocument owned;
  owned.document.metadata = {{"epoch", "3"}, {"quote \" and \\", "line\nbreak"}, {"gr\u00fc\u00dfe", "\U0001F600"}};
  owned.add<std::uint8_t>("flags", "BOOL", {3}, {1, 0, 1});
  owned.add<float>("fc.weight", "F32", {2, 3}, {1, -2, 3.5f, -0.0f, 1e30f, 1e-30f});
  owned.add<std::int64_t>("step", "I64", {}, {-77});
  owned.add<float>("empty", "F32", {0, 5}, {});
  owned.add<std::uint16_t>("half", "BF16", {1, 2}, {0x3f80, 0xc000});
  owned.add<double>("od\"d\n\u00e9", "F64", {1}, {0.1});
  return owned;
}

inline void store(const frugal::detail::Document& document, const std::filesystem::path& path) {
  auto file = frugal::LocalFiles{}.create(path);
  frugal::detail::write_document(document, file);
  file.commit();
}
