// expect: Trainer: two precision policies. Pass at most one AmpPolicy.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Precision{}, Precision{}};
  trainer.fit(batches);
}
