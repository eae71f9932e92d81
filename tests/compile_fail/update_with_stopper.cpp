// expect: backward, update: only precision, accumulation, clipping and update policies act here.
#include "parts.hpp"

int main() {
  frugal::EarlyStopper stopper;
  frugal::update(optimizer, stopper);
}
