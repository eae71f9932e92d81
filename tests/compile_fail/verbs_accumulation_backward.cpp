// expect: Trainer: the accumulation policy lacks a verb.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::accumulation;
  bool backward(auto&&) { return true; }  // without the weight
  double factor() const { return 1; }
  bool pending() const { return false; }
  void finish() {}
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
