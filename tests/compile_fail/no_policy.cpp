// expect: Trainer: every argument after the loss must be a policy or an observer.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss, [](const frugal::Progress&) {}};
  trainer.fit(batches);
}
