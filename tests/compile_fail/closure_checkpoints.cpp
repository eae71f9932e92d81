// expect: Trainer: the state of an optimizer that needs a closure (LBFGS) cannot be checkpointed. Drop CheckpointManager, or use AdamW.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, lbfgs, loss, Checkpoints{}};
  trainer.fit(batches);
}
