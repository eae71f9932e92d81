// expect: Trainer: two checkpointing policies. Pass at most one CheckpointManager.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Checkpoints{}, Checkpoints{}};
  trainer.fit(batches);
}
