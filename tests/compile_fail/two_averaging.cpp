// expect: Trainer: two averaging policies. Pass at most one Averager.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Average{}, Average{}};
  trainer.fit(batches);
}
