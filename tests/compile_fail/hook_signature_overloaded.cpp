// expect: Trainer: a hook has the wrong signature.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::observer;
  void on_epoch(int) {}
  void on_epoch(double) {}
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
