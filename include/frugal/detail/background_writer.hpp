#pragma once

#include <pthread.h>
#include <condition_variable>
#include <csignal>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace frugal::inline v0::detail {

// Runs one job at a time on a thread of its own, which the first job starts and the end of the writer joins. An error
// of a job comes out of the next submit() or wait(), once. Movable: a job refers to heap state of its owner, never to
// the owner, and the owner declares the writer after that state. submit, wait and the others belong to one thread at a
// time.
class BackgroundWriter {
 public:
  BackgroundWriter() = default;
  BackgroundWriter(BackgroundWriter&&) noexcept = default;
  BackgroundWriter& operator=(BackgroundWriter&&) noexcept = default;  // finishes what was in flight here before

  // Starts `job` when the one before has ended. If that one failed, its error comes out and `job` is not taken.
  void submit(std::function<void()> job) {
    wait();
    if (!worker_) worker_ = std::make_unique<Worker>();
    worker_->start(std::move(job));
  }

  // Returns when nothing is in flight; throws what the last job threw, unless it has been thrown before.
  void wait() {
    if (const std::exception_ptr error = take_error()) std::rethrow_exception(error);
  }

  // wait() for those that must not throw.
  std::exception_ptr take_error() noexcept { return worker_ ? worker_->finish() : nullptr; }

  // A job is in flight.
  bool busy() const { return worker_ && worker_->busy(); }

 private:
  class Worker {
   public:
    Worker() {
      // Signals are for the threads of the program: their handlers do not expect to run here.
      sigset_t all, before;
      ::sigfillset(&all);
      ::pthread_sigmask(SIG_SETMASK, &all, &before);
      try {
        thread_ = std::thread([this] { work(); });
      } catch (...) {
        ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
      }
      ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;
    ~Worker() {
      {
        std::lock_guard lock(mutex_);
        stopping_ = true;
      }
      changed_.notify_all();
      thread_.join();
    }

    void start(std::function<void()> job) {
      {
        std::lock_guard lock(mutex_);
        job_ = std::move(job);
        busy_ = true;
      }
      changed_.notify_all();
    }
    std::exception_ptr finish() {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !busy_; });
      return std::exchange(error_, nullptr);
    }
    bool busy() const {
      std::lock_guard lock(mutex_);
      return busy_;
    }

   private:
    void work() {
      std::unique_lock lock(mutex_);
      for (;;) {
        changed_.wait(lock, [this] { return busy_ || stopping_; });
        if (!busy_) return;  // a job that was taken is done, also at the end
        std::function<void()> job = std::exchange(job_, nullptr);
        lock.unlock();
        std::exception_ptr error;
        try {
          job();
        } catch (...) { error = std::current_exception(); }
        job = nullptr;  // what it holds is released outside of the lock, and before anybody hears that it has ended
        lock.lock();
        error_ = std::move(error);
        busy_ = false;
        changed_.notify_all();
      }
    }

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void()> job_;
    std::exception_ptr error_;
    bool busy_ = false, stopping_ = false;
    std::thread thread_;  // last: it starts when everything else is there
  };

  std::unique_ptr<Worker> worker_;
};

}  // namespace frugal::inline v0::detail
