// expect: backward: the weight is missing. Write `backward(loss, weight, policies...)`
#include "parts.hpp"

int main() {
  frugal::GradAccumulator accumulator(1);
  (void)frugal::backward(Loss{}, accumulator);
}
