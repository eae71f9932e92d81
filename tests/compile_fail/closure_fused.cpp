// expect: Trainer: an optimizer that needs a closure (LBFGS) has no fused kernel. Drop FusedStep, or use AdamW.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, lbfgs, loss, Fused{}};
  trainer.fit(batches);
}
