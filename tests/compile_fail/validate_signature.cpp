// expect: Trainer: validate does not fit.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss};
  trainer.fit(batches, [](Net&) { return 1.0; });
}
