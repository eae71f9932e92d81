// A user's program: LibTorch and frugal's headers from the target alone, and a tensor that went through both.
#include <ATen/ops/ones.h>

#include <cstdio>
#include <frugal/frugal.hpp>

int main() {
  at::Tensor weight = at::ones({3}).requires_grad_();
  frugal::GradAccumulator accumulator(2);
  const bool first = accumulator.backward(weight.sum(), 1.0);
  const bool second = accumulator.backward(weight.sum(), 1.0);
  accumulator.finish();
  const double gradient = weight.grad().sum().item<double>();
  std::printf("frugal %d.%d.%d, gradient %.1f\n", FRUGAL_VERSION_MAJOR, FRUGAL_VERSION_MINOR, FRUGAL_VERSION_PATCH,
              gradient);
  return !first && second && gradient == 3.0 ? 0 : 1;
}
