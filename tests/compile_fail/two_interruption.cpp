// expect: Trainer: two interruption policies. Pass at most one Preemption.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Interruption{}, Interruption{}};
  trainer.fit(batches);
}
