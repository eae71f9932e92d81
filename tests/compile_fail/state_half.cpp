// expect: Trainer: the state of a policy would not be saved.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::observer;
  void on_epoch(const frugal::Progress&) {}
  void save(auto& out) const { out.write("epochs", 1.0); }
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
