// expect: Trainer: restart() cannot renew a policy that has state.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::observer;
  void on_epoch(const frugal::Progress&) {}
  void save(auto&) const {}
  void load(auto&) {}
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.restart();
}
