#pragma once

#include <frugal/detail/directory_lock.hpp>
#include <frugal/detail/safetensors.hpp>
#include <frugal/detail/storage_local.hpp>
#include <frugal/policy.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace frugal::inline v0 {

/// One checkpoint file, as CheckpointManager::list() finds it.
struct CheckpointInfo {
  std::filesystem::path path;
  Progress progress;           ///< where the run stood; as new if the file is not valid
  std::uint64_t bytes = 0;     ///< size of the file
  bool valid = false;          ///< its size and its header are right; its tensors are verified by a restore
  std::string problem = {};    ///< why it is not valid, in a sentence
  bool metric_is_old = false;  ///< the metric was measured with other buffers: the file is no candidate for the best
};

namespace detail {

// Metadata of a file whose metric was measured with other buffers than those in it.
inline constexpr const char* old_metric_key = "frugal.metric";

// Progress as metadata, one key per field. Doubles are decimal and exact; also "nan" and "inf".
inline void each_progress_field(auto& progress, auto&& field) {
  field("progress.epoch", progress.epoch);
  field("progress.micro_batch", progress.micro_batch);
  field("progress.step", progress.step);
  field("progress.skipped", progress.skipped);
  field("progress.samples", progress.samples);
  field("progress.loss", progress.loss);
  field("progress.metric", progress.metric);
  field("progress.metric_step", progress.metric_step);
}

inline void write_progress(const Progress& progress, std::map<std::string, std::string>& metadata) {
  each_progress_field(progress, [&](const char* key, auto value) {
    std::array<char, 32> text;
    metadata[key] = std::string(text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr);
  });
}

// DamagedFile: a field is not there or no number.
inline Progress read_progress(const std::map<std::string, std::string>& metadata) {
  Progress progress;
  each_progress_field(progress, [&](const char* key, auto& value) {
    const auto found = metadata.find(key);
    if (found == metadata.end()) throw DamagedFile(std::string("it is no checkpoint: it has no ") + key);
    const std::string& text = found->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size())
      throw DamagedFile(std::string("it is no checkpoint: ") + key + " is '" + text + "'");
  });
  return progress;
}

// Files are named checkpoint-00000012.safetensors. The number grows with every file, so it tells their age; a step
// would not, because one step can be saved twice.
inline std::filesystem::path checkpoint_path(const std::filesystem::path& directory, std::int64_t number) {
  std::string digits = std::to_string(number);
  digits.insert(0, digits.size() < 8 ? 8 - digits.size() : 0, '0');
  return directory / ("checkpoint-" + digits + ".safetensors");
}

// nullopt: not a name that checkpoint_path() makes.
inline std::optional<std::int64_t> checkpoint_number(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  constexpr std::size_t digits_at = std::string_view("checkpoint-").size();
  std::int64_t number = 0;
  if (name.size() > digits_at) std::from_chars(name.data() + digits_at, name.data() + name.size(), number);
  return number > 0 && checkpoint_path({}, number) == name ? std::optional(number) : std::nullopt;
}

// By name alone, newest last. A directory that does not exist has none; one that cannot be read is an error
// (std::filesystem::filesystem_error), or a run would start afresh over its own checkpoints.
inline std::vector<std::filesystem::path> checkpoint_files(const std::filesystem::path& directory) {
  std::map<std::int64_t, std::filesystem::path> by_age;
  if (std::filesystem::exists(directory))
    for (const auto& entry : std::filesystem::directory_iterator(directory))
      if (const auto number = checkpoint_number(entry.path())) by_age.emplace(*number, entry.path());
  std::vector<std::filesystem::path> files;
  for (auto& [number, path] : by_age) files.push_back(std::move(path));
  return files;
}

// Reads the header.
inline CheckpointInfo inspect_checkpoint(const std::filesystem::path& path) {
  CheckpointInfo info{.path = path, .progress = {}};
  try {
    const DocumentReader file(path);
    info.progress = read_progress(file.metadata());
    info.metric_is_old = file.metadata().contains(old_metric_key);
    info.valid = true;
  } catch (const DamagedFile& damage) { info.problem = damage.what(); }
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (!error) info.bytes = size;
  return info;
}

// Newest last.
inline std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& directory) {
  std::vector<CheckpointInfo> all;
  for (const std::filesystem::path& path : checkpoint_files(directory)) all.push_back(inspect_checkpoint(path));
  return all;
}

struct Retention {
  std::int64_t keep_last = 2, keep_best = 1;
  Goal goal = Goal::minimize;
};

// The metric is finite and belongs to the weights in the file.
inline bool metric_counts(const Progress& progress) {
  return std::isfinite(progress.metric) && progress.metric_step == progress.step;
}

// The valid ones whose metric counts, best first; of two equal ones the older first. `all`: newest last.
inline std::vector<CheckpointInfo> best_checkpoints(const std::vector<CheckpointInfo>& all, Goal goal) {
  std::vector<CheckpointInfo> best;
  std::ranges::copy_if(all, std::back_inserter(best),
                       [](const auto& c) { return c.valid && !c.metric_is_old && metric_counts(c.progress); });
  std::ranges::stable_sort(best, {}, [&](const CheckpointInfo& c) {
    return goal == Goal::minimize ? c.progress.metric : -c.progress.metric;
  });
  return best;
}

// What may go once the newest of `all` is durable: everything but the newest valid `keep_last` (at least one) and the
// best `keep_best`. Damaged files count for nothing, and stay until `keep_last` valid ones are newer. `all`: newest
// last.
inline std::vector<std::filesystem::path> superseded(const std::vector<CheckpointInfo>& all,
                                                     const Retention& retention) {
  std::vector<CheckpointInfo> best = best_checkpoints(all, retention.goal);
  if (std::ssize(best) > retention.keep_best)
    best.resize(static_cast<std::size_t>(std::max<std::int64_t>(retention.keep_best, 0)));
  const auto is_best = [&](const CheckpointInfo& c) {
    return std::ranges::find(best, c.path, &CheckpointInfo::path) != best.end();
  };
  std::vector<std::filesystem::path> out;
  std::int64_t newer = 0;  // valid ones
  for (auto c = all.rbegin(); c != all.rend(); ++c) {
    if (newer >= std::max<std::int64_t>(retention.keep_last, 1) && !is_best(*c)) out.push_back(c->path);
    newer += c->valid ? 1 : 0;
  }
  return out;
}

}  // namespace detail
}  // namespace frugal::inline v0
