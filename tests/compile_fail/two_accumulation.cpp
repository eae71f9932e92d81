// expect: Trainer: two accumulation policies. Pass at most one GradAccumulator.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss, frugal::GradAccumulator(2), frugal::GradAccumulator(2)};
  trainer.fit(batches);
}
