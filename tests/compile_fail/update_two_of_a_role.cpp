// expect: backward, update: two policies of one role.
#include "parts.hpp"

int main() {
  Clip first, second;
  frugal::update(optimizer, first, second);
}
