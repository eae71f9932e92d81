#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>

// State in memory: what save(out) writes to and load(in) reads from.
namespace frugal::inline v0::detail {

// Named values and tensors. On the way out the tensors are the live ones, on the way in they are in host memory.
struct State {
  std::map<std::string, std::string> values;  // with their type: "int:3", "double:0.5", "string:AdamW"
  std::map<std::string, at::Tensor> tensors;

  // Throws when the name is taken: one of two values would be lost without a word.
  void add(std::string name, std::string text) {
    const auto [at, fresh] = values.try_emplace(std::move(name), std::move(text));
    TORCH_CHECK(fresh && !tensors.contains(at->first), "frugal: '", at->first, twice);
  }
  void add(std::string name, const at::Tensor& tensor) {
    if (!tensor.defined()) return add(std::move(name), "undefined tensor");
    const auto [at, fresh] = tensors.try_emplace(std::move(name), tensor.detach());
    TORCH_CHECK(fresh && !values.contains(at->first), "frugal: '", at->first, twice);
  }
  bool has(const std::string& name) const { return values.contains(name) || tensors.contains(name); }

 private:
  static constexpr std::string_view twice = "' is saved twice. Give every value a name of its own.";
};

template <class Value>
concept SavedTensor = std::derived_from<Value, at::Tensor>;
template <class Value>
concept SavedText = std::convertible_to<const Value&, std::string_view>;
template <class Value>
concept Saved =
    SavedTensor<Value> || SavedText<Value> || std::same_as<Value, std::int64_t> || std::same_as<Value, double>;

// Text that is not ASCII goes in hexadecimal: a file may hold nothing but UTF-8, a policy's string may hold anything.
inline std::string text_of(std::string_view text) {
  if (std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; }))
    return "string:" + std::string(text);
  std::string hexadecimal = "bytes:";
  for (const char c : text)
    for (const int shift : {4, 0}) hexadecimal += "0123456789abcdef"[(static_cast<unsigned char>(c) >> shift) & 0xF];
  return hexadecimal;
}
// Exact: the shortest text that reads back as the same bits. A NaN keeps its bits too.
template <class Number>
  requires std::same_as<Number, std::int64_t> || std::same_as<Number, double>
std::string text_of(Number number) {
  const bool nan = std::same_as<Number, double> && number != number;
  char digits[32];
  const auto print = [&](auto... arguments) {
    return std::string(digits, std::to_chars(digits, digits + sizeof digits, arguments...).ptr);
  };
  if (nan) return "nan:" + print(std::bit_cast<std::uint64_t>(number), 16);
  return (std::same_as<Number, double> ? "double:" : "int:") + print(number);
}

// False: the text is of another type.
inline bool parse(std::string_view text, std::string& value) {
  if (text.starts_with("string:")) return value = text.substr(7), true;
  if (!text.starts_with("bytes:") || text.size() % 2 != 0) return false;
  std::string bytes;
  for (text.remove_prefix(6); !text.empty(); text.remove_prefix(2)) {
    unsigned char byte = 0;
    if (std::from_chars(text.data(), text.data() + 2, byte, 16).ptr != text.data() + 2) return false;
    bytes += static_cast<char>(byte);
  }
  return value = std::move(bytes), true;
}
template <class Number>
  requires std::same_as<Number, std::int64_t> || std::same_as<Number, double>
bool parse(std::string_view text, Number& value) {
  const auto digits = [&](std::string_view type, auto& number, auto... base) {
    if (!text.starts_with(type)) return false;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + type.size(), end, number, base...);
    return error == std::errc{} && stop == end;
  };
  if constexpr (std::same_as<Number, std::int64_t>) return digits("int:", value);
  else {
    std::uint64_t bits = 0;
    if (digits("nan:", bits, 16)) return value = std::bit_cast<double>(bits), true;
    return digits("double:", value);
  }
}

// One section of a State on the way out. Passed to save(auto& out).
class StateOut {
 public:
  StateOut(State& state, std::string section) : state_(state), prefix_(std::move(section) + "/") {}

  template <class Value>
  void write(std::string_view name, const Value& value) {
    static_assert(Saved<Value>,
                  "frugal: save() writes a type that checkpoints do not know. Write at::Tensor, std::int64_t, "
                  "double or std::string.");
    std::string key = prefix_ + std::string(name);
    if constexpr (SavedTensor<Value>) state_.add(std::move(key), value);
    else if constexpr (SavedText<Value>) state_.add(std::move(key), text_of(std::string_view(value)));
    else if constexpr (Saved<Value>) state_.add(std::move(key), text_of(value));
  }

 private:
  State& state_;
  std::string prefix_;
};

// The same on the way in. Passed to load(auto& in). A tensor comes back in host memory, and belongs to who reads it.
class StateIn {
 public:
  StateIn(const State& state, std::string section) : state_(state), prefix_(std::move(section) + "/") {}

  bool has(std::string_view name) const { return state_.has(prefix_ + std::string(name)); }

  template <class Value>
  void read(std::string_view name, Value& value) const {
    static_assert(Saved<Value>,
                  "frugal: load() reads a type that checkpoints do not know. Read at::Tensor, std::int64_t, "
                  "double or std::string.");
    const std::string key = prefix_ + std::string(name);
    TORCH_CHECK(state_.has(key), "frugal: the checkpoint has no '", key,
                "'. Another version of the class wrote it: ask "
                "has() before read() where a value may be missing.");
    if constexpr (Saved<Value>) TORCH_CHECK(get(key, value), "frugal: '", key, "' has another type in the checkpoint.");
  }

 private:
  bool get(const std::string& key, at::Tensor& value) const {
    if (const auto found = state_.values.find(key); found != state_.values.end()) {
      if (found->second != "undefined tensor") return false;
      return value = at::Tensor(), true;
    }
    const at::Tensor& stored = state_.tensors.at(key);
    return value = stored.use_count() == 1 ? stored : stored.clone(), true;  // nobody else holds it
  }
  template <class Value>
  bool get(const std::string& key, Value& value) const {
    const auto found = state_.values.find(key);
    return found != state_.values.end() && parse(found->second, value);
  }

  const State& state_;
  std::string prefix_;
};

}  // namespace frugal::inline v0::detail
