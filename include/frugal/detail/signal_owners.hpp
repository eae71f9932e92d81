#pragma once

#include <atomic>
#include <csignal>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// What a signal handler can reach. Lock-free, so that a handler may touch it.
struct SignalFlags {
  static inline std::atomic<unsigned> arrived{0};
  static inline std::atomic<bool> ending{false};
  static_assert(std::atomic<unsigned>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

  static void handle(int signal) {
    arrived.fetch_add(1);
    if (!ending.exchange(true)) return;
    struct sigaction action{};  // the second one ends the process, as soon as this handler returns
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
    raise(signal);
  }
};

// Handlers are the process's: the first owner of a signal installs ours, the last one restores the previous.
class SignalOwners {
 public:
  static void acquire(int signal) {
    const std::lock_guard lock(mutex());
    if (auto known = owners().find(signal); known != owners().end()) return void(++known->second.count);
    struct sigaction action{}, previous{};
    action.sa_handler = &SignalFlags::handle;
    action.sa_flags = SA_RESTART;  // system calls of the data pipeline go on
    sigemptyset(&action.sa_mask);
    if (sigaction(signal, &action, &previous) != 0)
      throw std::invalid_argument("Preemption: signal " + std::to_string(signal) +
                                  " cannot be handled. Remove it from signals.");
    if (owners().empty()) SignalFlags::ending = false;
    owners().emplace(signal, Owned{1, previous});
  }
  static void release(int signal) noexcept {
    const std::lock_guard lock(mutex());
    const auto known = owners().find(signal);
    if (known == owners().end() || --known->second.count > 0) return;
    struct sigaction now{};
    if (sigaction(signal, nullptr, &now) == 0 && now.sa_handler == &SignalFlags::handle)
      sigaction(signal, &known->second.previous, nullptr);
    owners().erase(known);
  }

 private:
  struct Owned {
    int count;
    struct sigaction previous;
  };
  static std::mutex& mutex() {
    static std::mutex only;
    return only;
  }
  static std::map<int, Owned>& owners() {
    static std::map<int, Owned> all;
    return all;
  }
};

// The signals of one owner, and whether any arrived since it began. Movable.
class OwnedSignals {
 public:
  explicit OwnedSignals(std::vector<int> signals) {
    for (const int signal : signals) {
      try {
        SignalOwners::acquire(signal);
      } catch (...) {
        release();
        throw;
      }
      signals_.push_back(signal);
    }
    seen_ = SignalFlags::arrived.load();
  }
  OwnedSignals(OwnedSignals&& other) noexcept : signals_(std::exchange(other.signals_, {})), seen_(other.seen_) {}
  OwnedSignals& operator=(OwnedSignals&& other) noexcept {
    if (this == &other) return *this;
    release();
    signals_ = std::exchange(other.signals_, {});
    seen_ = other.seen_;
    return *this;
  }
  ~OwnedSignals() { release(); }

  bool arrived() const { return !signals_.empty() && SignalFlags::arrived.load(std::memory_order_relaxed) != seen_; }
  // The next signal is a first one again.
  void forget() {
    seen_ = SignalFlags::arrived.load();
    SignalFlags::ending = false;
  }

 private:
  void release() noexcept {
    for (const int signal : signals_) SignalOwners::release(signal);
    signals_.clear();
  }

  std::vector<int> signals_;
  unsigned seen_ = 0;
};

}  // namespace frugal::inline v0::detail
