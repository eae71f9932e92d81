#pragma once

#include <exception>
#include <functional>

namespace frugal::inline v0::detail {

// Runs one job at a time on a thread of its own, which is started by the first job and kept. Movable: a job must refer
// to heap state of its owner, and the owner declares the writer last.
class BackgroundWriter {
 public:
  BackgroundWriter();
  BackgroundWriter(BackgroundWriter&&) noexcept;
  BackgroundWriter& operator=(BackgroundWriter&&) noexcept;
  ~BackgroundWriter();                       // finishes the job in flight; its error is lost (take_error() before)
  void submit(std::function<void()> job);    // waits for the job before; if that failed: rethrows, and `job` is dropped
  void wait();                               // until nothing is in flight; rethrows, once
  std::exception_ptr take_error() noexcept;  // as wait(), for destructors
  bool busy() const;                         // a job is in flight
};

}  // namespace frugal::inline v0::detail
