// expect: Trainer: the interruption policy lacks its verb.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::interruption;
  bool requested() { return false; }  // not const
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
