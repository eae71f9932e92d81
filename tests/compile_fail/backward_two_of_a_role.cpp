// expect: backward, update: two policies of one role.
#include "parts.hpp"

int main() {
  frugal::GradAccumulator first(1), second(2);
  (void)frugal::backward(Loss{}, 1, first, second);
}
