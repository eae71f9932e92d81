// expect: Trainer: the checkpointing policy lacks a verb.
#include "parts.hpp"

struct Mine {
  static constexpr frugal::Role role = frugal::Role::checkpointing;
  bool due(const frugal::Progress&) const { return false; }
  void save(const frugal::Progress&, auto&, auto&) {}  // the policies would not be in the file
  std::optional<frugal::Progress> restore(auto&, auto&) { return {}; }
  void wait() {}
};

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Mine{}};
  trainer.fit(batches);
}
