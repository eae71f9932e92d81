// expect: Trainer: the state of a policy would not be saved.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::observer;
  void on_epoch(const frugal::Progress&) {}
  void save(auto&) {}
  void load(auto&) {}
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
