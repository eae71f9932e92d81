// expect: Trainer: an optimizer that needs a closure (LBFGS) evaluates the batch itself. Drop GradAccumulator, or use AdamW.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, lbfgs, loss, frugal::GradAccumulator(2)};
  trainer.fit(batches);
}
