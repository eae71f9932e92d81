// expect: Trainer: the averaging policy lacks a verb.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::averaging;
  void update(auto&) {}
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
