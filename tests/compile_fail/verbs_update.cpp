// expect: Trainer: the update policy lacks its verb.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::update;
  void update(auto&) {}
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
