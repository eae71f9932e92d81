// expect: Trainer: the clipping policy lacks its verb.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::clipping;
  void clipp(auto&) {}
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
