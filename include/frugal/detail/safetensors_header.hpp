#pragma once

#include <frugal/detail/json_text.hpp>
#include <frugal/detail/xxhash64.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// One tensor of a file.
struct StoredTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // first byte, counted from the start of the data
  std::uint64_t nbytes = 0;
  std::uint64_t hash = 0;
};

// The header of a safetensors file (huggingface.co/docs/safetensors): 8 bytes with the length of a JSON text, the text,
// and after it the data without holes.
//
//     {"__metadata__":{"frugal.xxh64":"<16 digits>","key":"value",...,"frugal.xxh64.<tensor>":"<16 digits>",...},
//      "<tensor>":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},...}
//
// frugal.xxh64.<tensor> is the hash of the tensor's bytes. frugal.xxh64 comes first, at a fixed place, and is the hash
// of the header itself: of the 8 bytes and the text, the spaces at its end included, with zeros for these 16 digits. So
// no byte of a file is without a hash. Hashes are XXH64 with seed 0, in lower-case hexadecimal digits.
struct Header {
  std::map<std::string, std::string> metadata;  // without the hashes
  std::vector<StoredTensor> tensors;            // in the order of their bytes
};

inline constexpr std::string_view hash_key = "frugal.xxh64";
inline constexpr std::string_view header_start = "{\"__metadata__\":{\"frugal.xxh64\":\"";
inline constexpr std::size_t length_bytes = 8, hash_at = length_bytes + header_start.size(), hash_digits = 16;
inline constexpr std::uint64_t longest_header = 100'000'000;  // more is refused by other readers as well

// Bytes of one element; 0: the format has no such type (or one of less than a byte).
inline std::uint64_t dtype_bytes(std::string_view dtype) {
  const auto among = [&](auto... names) { return ((dtype == names) || ...); };
  if (among("F64", "I64", "U64", "C64")) return 8;
  if (among("F32", "I32", "U32")) return 4;
  if (among("F16", "BF16", "I16", "U16")) return 2;
  return among("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0") ? 1 : 0;
}

// Bytes of a tensor. std::runtime_error: no such type, a negative size, more than 2^63 bytes.
inline std::uint64_t tensor_bytes(std::string_view dtype, std::span<const std::int64_t> shape) {
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::uint64_t bytes = dtype_bytes(dtype);
  if (bytes == 0) throw std::runtime_error("the dtype '" + std::string(dtype) + "' is not known");
  for (const std::int64_t size : shape) {
    const auto extent = static_cast<std::uint64_t>(size);
    if (size < 0 || (extent != 0 && bytes > most / extent)) throw std::runtime_error("the shape is impossible");
    bytes *= extent;
  }
  return bytes;
}

inline std::string hash_text(std::uint64_t hash) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text(hash_digits, '0');
  for (std::size_t i = hash_digits; i-- > 0; hash >>= 4) text[i] = digits[hash & 15];
  return text;
}

inline std::uint64_t hash_of_header(std::string_view header) {
  const auto bytes = std::as_bytes(std::span(header));
  constexpr std::array<char, hash_digits> zeros{'0', '0', '0', '0', '0', '0', '0', '0',
                                                '0', '0', '0', '0', '0', '0', '0', '0'};
  Xxhash64 hash;
  hash.update(bytes.first(hash_at));
  hash.update(std::as_bytes(std::span(zeros)));
  hash.update(bytes.subspan(hash_at + hash_digits));
  return hash.value();
}

// Length and text. The data after it start at a multiple of 64. std::invalid_argument: a name that is not UTF-8.
inline std::string encode_header(const Header& header) {
  std::string out(length_bytes, '\0');
  out.append(header_start).append(hash_digits, '0').append("\"");
  const auto member = [&](std::string_view key, std::string_view value) {
    out += ',';
    append_json_string(out, key);
    out += ':';
    append_json_string(out, value);
  };
  for (const auto& [key, value] : header.metadata) member(key, value);
  for (const StoredTensor& t : header.tensors) member(std::string(hash_key) + "." + t.name, hash_text(t.hash));
  out += '}';
  for (const StoredTensor& t : header.tensors) {
    out += ',';
    append_json_string(out, t.name);
    out.append(":{\"dtype\":\"").append(t.dtype).append("\",\"shape\":[");
    for (std::size_t i = 0; i < t.shape.size(); ++i) out.append(i == 0 ? "" : ",").append(std::to_string(t.shape[i]));
    out.append("],\"data_offsets\":[").append(std::to_string(t.begin));
    out.append(",").append(std::to_string(t.begin + t.nbytes)).append("]}");
  }
  out += '}';
  out.resize((out.size() + 63) / 64 * 64, ' ');
  const std::uint64_t length = out.size() - length_bytes;
  std::memcpy(out.data(), &length, length_bytes);
  out.replace(hash_at, hash_digits, hash_text(hash_of_header(out)));
  return out;
}

inline StoredTensor parse_tensor(JsonReader& json, const std::string& name) {
  StoredTensor tensor;
  tensor.name = name;
  std::vector<std::int64_t> offsets;
  int members = 0;
  json.object([&](const std::string& key) {
    ++members;
    if (key == "dtype") tensor.dtype = json.string();
    else if (key == "shape") json.array([&] { tensor.shape.push_back(json.integer()); });
    else if (key == "data_offsets") json.array([&] { offsets.push_back(json.integer()); });
    else json.fail("the tensor '" + name + "' has the unknown field \"" + key + "\"");
  });
  if (members != 3 || offsets.size() != 2 || offsets[0] > offsets[1])
    json.fail("the tensor '" + name + "' lacks a field or its offsets are no range");
  tensor.begin = static_cast<std::uint64_t>(offsets[0]);
  tensor.nbytes = static_cast<std::uint64_t>(offsets[1] - offsets[0]);
  return tensor;
}

// The text of a header whose hash is right, followed by `data_bytes` bytes of data. std::runtime_error: what is wrong.
inline Header parse_header(std::string_view text, std::uint64_t data_bytes) {
  Header out;
  JsonReader json(text);
  json.object([&](const std::string& name) {
    if (name != "__metadata__") return out.tensors.push_back(parse_tensor(json, name));
    json.object([&](const std::string& key) { out.metadata[key] = json.string(); });
  });
  json.end();

  std::ranges::stable_sort(out.tensors, {}, [](const StoredTensor& t) { return std::pair(t.begin, t.nbytes); });
  std::uint64_t end = 0;
  for (StoredTensor& t : out.tensors) {
    if (t.begin != end) throw std::runtime_error("the bytes of '" + t.name + "' overlap others or leave a hole");
    if (t.nbytes != tensor_bytes(t.dtype, t.shape))
      throw std::runtime_error("'" + t.name + "' has another size than its dtype and shape say");
    end += t.nbytes;
    const auto stored = out.metadata.extract(std::string(hash_key) + "." + t.name);
    if (!stored || stored.mapped().size() != hash_digits) throw std::runtime_error("'" + t.name + "' has no hash");
    const auto [last, error] =
        std::from_chars(stored.mapped().data(), stored.mapped().data() + hash_digits, t.hash, 16);
    if (error != std::errc{} || last != stored.mapped().data() + hash_digits)
      throw std::runtime_error("'" + t.name + "' has no hash");
  }
  if (end != data_bytes)
    throw std::runtime_error("it has " + std::to_string(data_bytes) + " bytes of data instead of " +
                             std::to_string(end));
  out.metadata.erase(std::string(hash_key));
  return out;
}

}  // namespace frugal::inline v0::detail
