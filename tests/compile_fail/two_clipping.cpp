// expect: Trainer: two clipping policies. Pass at most one GradClip.
#include "parts.hpp"

int main() {
  frugal::Trainer trainer{net, optimizer, loss, Clip{}, Clip{}};
  trainer.fit(batches);
}
