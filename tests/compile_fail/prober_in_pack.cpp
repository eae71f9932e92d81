// expect: Trainer: BatchSizeProber runs before training. Call plan(), then pass GradAccumulator(plan.steps).
#include "parts.hpp"

struct Prober { static constexpr frugal::Role role = frugal::Role::before_training; };

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Prober{}};
  trainer.fit(batches);
}
