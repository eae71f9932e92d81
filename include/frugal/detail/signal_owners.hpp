#pragma once

#include <atomic>
#include <csignal>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// What one owner listens to, and whether it heard any of it. A handler walks over all of them, at any moment and in any
// thread: so they are lock-free and never freed, and the next owner takes the place of one that is gone.
struct SignalListener {
  using Set = std::uint64_t;  // Linux numbers signals from 1 to 64
  static constexpr Set bit(int signal) { return Set{1} << (signal - 1); }

  std::atomic<Set> signals{0};
  std::atomic<bool> heard{false};
  SignalListener* next = nullptr;
  bool taken = true;  // guarded by the mutex of SignalOwners

  static inline std::atomic<SignalListener*> first{nullptr};
  static_assert(std::atomic<Set>::is_always_lock_free && std::atomic<bool>::is_always_lock_free &&
                std::atomic<SignalListener*>::is_always_lock_free);

  static void handle(int signal) {
    bool second = false;  // for any owner, whatever the others heard
    for (SignalListener* at = first.load(); at; at = at->next)
      if (at->signals.load() & bit(signal)) second |= at->heard.exchange(true);
    if (!second) return;
    struct sigaction action{};  // ends the process, as soon as this handler returns
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
    raise(signal);
  }
};

// Handlers are the process's: the first owner of a signal installs ours, the last one restores the previous.
class SignalOwners {
 public:
  // Hears nothing yet.
  static SignalListener& listener() {
    const std::lock_guard lock(mutex());
    for (SignalListener* at = SignalListener::first; at; at = at->next)
      if (!at->taken) {
        at->taken = true, at->heard = false;
        return *at;
      }
    auto* const made = new SignalListener{.next = SignalListener::first};
    SignalListener::first = made;
    return *made;
  }
  static void acquire(SignalListener& listener, int signal) {
    const std::lock_guard lock(mutex());
    if (auto known = owners().find(signal); known != owners().end()) {
      if (listener.signals & SignalListener::bit(signal)) return;  // named twice
      ++known->second.count;
    } else {
      struct sigaction action{}, previous{};
      action.sa_handler = &SignalListener::handle;
      action.sa_flags = SA_RESTART;  // system calls of the data pipeline go on
      sigemptyset(&action.sa_mask);
      if (sigaction(signal, &action, &previous) != 0)
        throw std::invalid_argument("Preemption: signal " + std::to_string(signal) +
                                    " cannot be handled. Remove it from signals.");
      owners().emplace(signal, Owned{1, previous});
    }
    listener.signals |= SignalListener::bit(signal);
  }
  static void release(SignalListener& listener) noexcept {
    const std::lock_guard lock(mutex());
    const SignalListener::Set signals = listener.signals.exchange(0);
    for (auto at = owners().begin(); at != owners().end();) {
      const auto known = at++;
      if (!(signals & SignalListener::bit(known->first)) || --known->second.count > 0) continue;
      struct sigaction now{};
      if (sigaction(known->first, nullptr, &now) == 0 && now.sa_handler == &SignalListener::handle)
        sigaction(known->first, &known->second.previous, nullptr);
      owners().erase(known);
    }
    listener.taken = false;
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
  explicit OwnedSignals(const std::vector<int>& signals) : listener_(&SignalOwners::listener()) {
    try {
      for (const int signal : signals) SignalOwners::acquire(*listener_, signal);
    } catch (...) {
      release();
      throw;
    }
  }
  OwnedSignals(OwnedSignals&& other) noexcept : listener_(std::exchange(other.listener_, nullptr)) {}
  OwnedSignals& operator=(OwnedSignals&& other) noexcept {
    if (this == &other) return *this;
    release();
    listener_ = std::exchange(other.listener_, nullptr);
    return *this;
  }
  ~OwnedSignals() { release(); }

  // Not of one that was moved from.
  bool arrived() const { return listener_->heard.load(std::memory_order_relaxed); }
  // The next signal is a first one again, for this owner.
  void forget() { listener_->heard = false; }

 private:
  void release() noexcept {
    if (listener_) SignalOwners::release(*std::exchange(listener_, nullptr));
  }

  SignalListener* listener_;  // null: moved from
};

}  // namespace frugal::inline v0::detail
