// expect: Trainer: two stopping policies. Pass at most one EarlyStopper.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss, frugal::EarlyStopper(), frugal::EarlyStopper()};
  trainer.fit(batches);
}
