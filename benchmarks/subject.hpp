#pragma once

#include "json.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

// One thing to be measured, in a process of its own: so that no allocator, thread pool or cache is shared between the two
// sides of a comparison. suite.py starts two and has them work in turns; README.md describes what they say to each other.
namespace bench {

class Subject {
 public:
  virtual ~Subject() = default;

  /// What is measured, in a few words.
  virtual std::string what() const = 0;
  /// Works `n` times and says how long that took: {"seconds": ...}, and what else it knows.
  virtual Json run(std::int64_t n) = 0;
  /// Works `n` times from the beginning and writes what came out, as float32 numbers; {"losses": [...]}.
  virtual Json check(std::int64_t n, const std::string& file) = 0;
  /// How far what came out is from what another subject wrote: {"difference": share of what the work changed}, and
  /// "moved", see comparison().
  virtual Json compare(const std::string& file) = 0;
  /// What one of `n` times costs: {"allocations": ..., "operators": ..., "casts": ..., "reads": ...}.
  virtual Json count(std::int64_t) { throw std::invalid_argument("costs of this subject are not counted"); }
  /// Works `n` times under callgrind, which counts them.
  virtual Json instructions(std::int64_t) {
    throw std::invalid_argument("instructions of this subject are not counted");
  }
  /// Writes data and weights for a peer.
  virtual Json export_to(const std::string&) { throw std::invalid_argument("this subject has no peers"); }
  /// Work of one time, for the fraction of the ceiling: {"flops": ..., "bytes": ..., "samples": ...}.
  virtual Json work() const { return Json{{"flops", 0}}; }
};

// What the command line says.
struct Settings {
  std::string kind, workload = "W2", loop = "frugal", precision = "fp32", method, device = "cpu", directory, data;
  std::int64_t batch = 0, window = 1, split = 1;
  bool forward_backward = false, channels_last = false, fused = true, clip = false, tuned = false;
  bool attention_in_fp32 = false, casts_per_step = false, lagged_skips = false;
  int threads = 1;
  std::uint64_t seed = 1;
  double target = 0;
};

std::unique_ptr<Subject> make_training_step(const Settings& settings);
std::unique_ptr<Subject> make_update(const Settings& settings);
std::unique_ptr<Subject> make_save(const Settings& settings);
std::unique_ptr<Subject> make_epoch(const Settings& settings);
std::unique_ptr<Subject> make_probe(const Settings& settings);
std::unique_ptr<Subject> make_ceiling(const Settings& settings);
std::unique_ptr<Subject> make_target(const Settings& settings);

/// Seconds that `work()` takes, and waits for the device on both ends.
double seconds_of(const std::function<void()>& work);

}  // namespace bench
