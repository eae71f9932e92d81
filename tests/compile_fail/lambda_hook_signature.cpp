// expect: Trainer: a hook has the wrong signature.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss, frugal::OnEpoch{[](int) {}}};
  trainer.fit(batches);
}
