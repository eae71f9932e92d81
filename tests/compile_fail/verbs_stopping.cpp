// expect: Trainer: the stopping policy lacks a verb.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::stopping;
  bool observe(double) { return false; }  // no Verdict
  frugal::StopReason reason() const { return {}; }
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
