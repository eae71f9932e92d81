// expect: Trainer: a hook has a name that nobody calls.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::observer;
  void on_epoch(const frugal::Progress&) {}
  void on_step_end(const frugal::Progress&) {}
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
