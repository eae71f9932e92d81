// expect: Trainer: two update policies. Pass at most one FusedStep.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Fused{}, Fused{}};
  trainer.fit(batches);
}
