// Compiles: so the others fail for their own reason.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net,
                          optimizer,
                          loss,
                          Precision{},
                          frugal::GradAccumulator(2),
                          Clip{},
                          Fused{},
                          Rate{},
                          Average{},
                          frugal::EarlyStopper(),
                          Checkpoints{},
                          Interruption{},
                          frugal::OnGradients{[](Net&) {}},
                          frugal::OnStep{[](const frugal::Progress&) {}, 10},
                          frugal::OnEpoch{[](const frugal::Progress&, const frugal::Readings&) {}}};
  trainer.step(Batch{});
  trainer.flush();
  trainer.check(1.0);
  frugal::Trainer with_closure{net, lbfgs, loss, frugal::EarlyStopper()};
  with_closure.fit(batches, [] { return frugal::Metrics{{"loss", 1.0}}; });
  return trainer.fit(batches, [](const Interruption&) { return 1; }, {.epochs = 2}).exit_code();
}
