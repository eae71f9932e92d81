// expect: Trainer: two schedules. Pass at most one Schedule
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Rate{}, Rate{}};
  trainer.fit(batches);
}
