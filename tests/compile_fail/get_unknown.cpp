// expect: Trainer: get<Policy>() asks for a policy that was not passed.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss};
  trainer.get<frugal::EarlyStopper>();
}
