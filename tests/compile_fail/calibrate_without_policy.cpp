// expect: Trainer: calibrate() needs an AmpPolicy, an optimizer that steps without a closure, and
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Precision{}};
  trainer.calibrate(Batch{});
}
