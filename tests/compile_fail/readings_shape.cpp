// expect: Trainer: the readings of a policy would not be seen.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::observer;
  void on_epoch(const frugal::Progress&) {}
  double readings() const { return 1; }
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
