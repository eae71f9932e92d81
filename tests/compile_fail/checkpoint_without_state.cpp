// expect: CheckpointManager: an argument has no state that can be saved.
#include <frugal/detail/checkpoint_arguments.hpp>

struct Stateless {};
struct Counter {
  std::int64_t count = 0;
  void save(auto& out) const { out.write("count", count); }
  void load(auto& in) { in.read("count", count); }
};

int main() {
  static_assert(frugal::detail::all_have_state<Counter>());
  return frugal::detail::all_have_state<Counter, Stateless>() ? 0 : 1;
}
