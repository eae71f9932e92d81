// expect: Trainer: the schedule lacks its verb.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::schedule;
  void apply(auto&) {}
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
