// expect: Trainer: the loss function does not fit.
#include "parts.hpp"

int main() {
  auto wrong = [](const Batch&) { return Loss{}; };
  frugal::Trainer trainer{net, optimizer, wrong};
  trainer.fit(batches);
}
