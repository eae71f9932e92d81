// expect: Trainer: the precision policy lacks a verb.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::precision;
  int autocast() { return 0; }
  void unscale(auto&, double) {}
  bool step(auto&) { return true; }
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
