// expect: Trainer: an optimizer that needs a closure (LBFGS) evaluates gradients itself. Drop GradClip, or use AdamW.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, lbfgs, loss, Clip{}};
  trainer.fit(batches);
}
