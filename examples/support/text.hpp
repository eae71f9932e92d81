#pragma once

#include <frugal/batches.hpp>

#include <torch/torch.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Text, cut into windows for a model that predicts the next character. A character is a byte; 0 ends a paragraph.
namespace examples {

constexpr std::int64_t characters = 256, ignored = -1;  // targets behind the end of a paragraph do not count

// A file as one string. zlib reads plain files as well as compressed ones.
inline std::string read_text(const std::filesystem::path& file) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> in(gzopen(file.c_str(), "rb"), gzclose);
  if (!in) throw std::runtime_error("cannot read " + file.string());
  std::string text;
  std::array<char, 1 << 16> part{};
  int n = 0;
  while ((n = gzread(in.get(), part.data(), part.size())) > 0) text.append(part.data(), static_cast<std::size_t>(n));
  if (n < 0) throw std::runtime_error(file.string() + " is damaged");
  return text;
}

// The file that the user named, else the Jargon File, where Debian's package puts it.
inline std::string text_of(const std::string& given) {
  if (!given.empty()) return read_text(given);
  const std::filesystem::path jargon = "/usr/share/doc/jargon-text/jargon.txt";
  for (const char* suffix : {"", ".gz"})
    if (exists(std::filesystem::path(jargon.string() + suffix))) return read_text(jargon.string() + suffix);
  throw std::runtime_error(
      "There is no text. Install the Debian or Ubuntu package jargon-text (the Jargon File), or name "
      "a file of your own with --text; it may be compressed.");
}

// What stands between empty lines, white space collapsed, the shortest ones left out.
inline std::vector<std::string> paragraphs_of(std::string_view text, std::size_t shortest = 40) {
  std::vector<std::string> paragraphs;
  std::string current;
  int newlines = 0;
  const auto end_paragraph = [&] {
    if (current.size() >= shortest) paragraphs.push_back(current);
    current.clear();
  };
  for (const char c : text) {
    if (c == '\n' && ++newlines > 1) end_paragraph();
    if (std::isspace(static_cast<unsigned char>(c)) || c == 0) {
      if (!current.empty() && current.back() != ' ') current += ' ';
    } else {
      newlines = 0;
      current += c;
    }
  }
  end_paragraph();
  return paragraphs;
}

// Some windows of different lengths, padded to the longest: int64 [n, longest].
struct Windows : frugal::Batch {
  std::int64_t tokens = 0;  // characters to predict
};

// Paragraphs cut into windows of at most `context` characters. The last window of a paragraph is shorter.
class Text {
 public:
  Text(const std::vector<std::string>& paragraphs, std::int64_t context) {
    for (const std::string& paragraph : paragraphs) {
      const auto begin = static_cast<std::int64_t>(all_.size()), n = static_cast<std::int64_t>(paragraph.size()) + 1;
      all_.push_back(0);
      for (const char c : paragraph) all_.push_back(static_cast<unsigned char>(c));
      for (std::int64_t at = 0; at < n; at += context) windows_.push_back({begin + at, std::min(context, n - at)});
    }
    all_.push_back(0);
    if (windows_.empty()) throw std::runtime_error("The text has no paragraphs.");
  }

  std::int64_t size() const { return static_cast<std::int64_t>(windows_.size()); }
  std::int64_t tokens() const { return static_cast<std::int64_t>(all_.size()) - 1; }
  const std::vector<std::int64_t>& all() const { return all_; }

  // The windows with these numbers.
  Windows fetch(const torch::Tensor& numbers) const {
    std::vector<Window> chosen;
    std::int64_t longest = 0, tokens = 0;
    for (std::int64_t i = 0; i < numbers.size(0); ++i) {
      chosen.push_back(windows_[static_cast<std::size_t>(numbers.const_data_ptr<std::int64_t>()[i])]);
      longest = std::max(longest, chosen.back().length);
      tokens += chosen.back().length;
    }
    const auto n = numbers.size(0);
    Windows windows{{torch::zeros({n, longest}, torch::kLong), torch::full({n, longest}, ignored, torch::kLong)},
                    tokens};
    for (std::int64_t i = 0; i < n; ++i) {
      const auto [begin, length] = chosen[static_cast<std::size_t>(i)];
      const auto* const from = all_.data() + begin;
      std::copy_n(from, length, windows.inputs.mutable_data_ptr<std::int64_t>() + i * longest);
      std::copy_n(from + 1, length, windows.targets.mutable_data_ptr<std::int64_t>() + i * longest);
    }
    return windows;
  }

 private:
  struct Window { std::int64_t begin, length; };

  std::vector<std::int64_t> all_;  // 0, first paragraph, 0, second paragraph, ... 0
  std::vector<Window> windows_;
};

// Paragraphs for training and, one in `share`, for validation.
inline std::pair<Text, Text> split(const std::vector<std::string>& paragraphs, std::int64_t context,
                                   std::size_t share) {
  std::vector<std::string> training, validation;
  for (std::size_t i = 0; i < paragraphs.size(); ++i)
    (i % share == share - 1 ? validation : training).push_back(paragraphs[i]);
  return {Text(training, context), Text(validation, context)};
}

}  // namespace examples
