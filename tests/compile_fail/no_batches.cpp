// expect: Trainer: fit() cannot iterate over the batches.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss};
  trainer.fit(3);
}
