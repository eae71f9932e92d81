// expect: Trainer: an optimizer that needs a closure (LBFGS) cannot skip an overflow. Use AmpPolicy<Bf16> or AmpPolicy<Fp32>, or use AdamW.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, lbfgs, loss, Precision{}};
  trainer.fit(batches);
}
