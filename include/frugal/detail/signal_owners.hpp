#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// What a signal handler can reach. Lock-free, so that a handler may touch it.
struct SignalFlags {
  static constexpr std::size_t signals = 65;  // Linux numbers them from 1 to 64
  using Set = std::uint64_t;
  static constexpr Set bit(int signal) { return Set{1} << (signal - 1); }

  static inline std::array<std::atomic<unsigned>, signals> arrived{};  // by signal
  static inline std::array<std::atomic<Set>, signals> together{};      // what the owners of a signal own besides
  static inline std::atomic<Set> ending{0};                            // the next one of these ends the process
  static_assert(std::atomic<unsigned>::is_always_lock_free && std::atomic<Set>::is_always_lock_free);

  static unsigned arrivals(int signal) {
    return arrived[static_cast<std::size_t>(signal)].load(std::memory_order_relaxed);
  }

  static void handle(int signal) {
    const auto at = static_cast<std::size_t>(signal);
    arrived[at].fetch_add(1);
    if ((ending.fetch_or(bit(signal) | together[at].load()) & bit(signal)) == 0) return;
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
    SignalFlags::ending &= ~SignalFlags::bit(signal);  // of owners that are gone
    for (auto& others : SignalFlags::together) others &= ~SignalFlags::bit(signal);
    SignalFlags::together[static_cast<std::size_t>(signal)] = 0;
    owners().emplace(signal, Owned{1, previous});
  }
  // One owner has all of these: the second of them, whichever it is, ends the process.
  static void join(const std::vector<int>& signals) noexcept {
    const std::lock_guard lock(mutex());
    SignalFlags::Set all = 0;
    for (const int signal : signals) all |= SignalFlags::bit(signal);
    for (const int signal : signals) SignalFlags::together[static_cast<std::size_t>(signal)] |= all;
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

// The signals of one owner, and whether any of them arrived since it began. Movable.
class OwnedSignals {
 public:
  explicit OwnedSignals(const std::vector<int>& signals) {
    for (const int signal : signals) {
      try {
        SignalOwners::acquire(signal);
      } catch (...) {
        release();
        throw;
      }
      signals_.push_back({signal, SignalFlags::arrivals(signal)});
    }
    SignalOwners::join(signals);
  }
  OwnedSignals(OwnedSignals&& other) noexcept : signals_(std::exchange(other.signals_, {})) {}
  OwnedSignals& operator=(OwnedSignals&& other) noexcept {
    if (this == &other) return *this;
    release();
    signals_ = std::exchange(other.signals_, {});
    return *this;
  }
  ~OwnedSignals() { release(); }

  bool arrived() const {
    return std::ranges::any_of(signals_,
                               [](const Heard& one) { return SignalFlags::arrivals(one.signal) != one.seen; });
  }
  // The next signal is a first one again.
  void forget() {
    for (Heard& one : signals_) {
      one.seen = SignalFlags::arrivals(one.signal);
      SignalFlags::ending &= ~SignalFlags::bit(one.signal);
    }
  }

 private:
  struct Heard {
    int signal;
    unsigned seen;
  };

  void release() noexcept {
    for (const Heard& one : signals_) SignalOwners::release(one.signal);
    signals_.clear();
  }

  std::vector<Heard> signals_;
};

}  // namespace frugal::inline v0::detail
