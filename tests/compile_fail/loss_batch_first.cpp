// expect: Trainer: the loss function takes the batch first.
#include "parts.hpp"

int main() {
  auto wrong = [](const Batch&, Net&) { return Loss{}; };
  frugal::Trainer trainer{net, optimizer, wrong};
  trainer.fit(batches);
}
