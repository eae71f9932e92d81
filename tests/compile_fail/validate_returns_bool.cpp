// expect: Trainer: validate returns no metric. Return a number, a 0-dim tensor or Metrics.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss};
  trainer.fit(batches, [] { return true; });
}
