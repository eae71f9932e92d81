// expect: Trainer: the accumulation policy lacks a verb.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::accumulation;
  bool backward(auto&&, double) { return true; }
  void factor() const {}  // no number
  bool pending() const { return false; }
  void finish() {}
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
