#include "../tests/overhead/heap.hpp"

#include <cstdint>

namespace bench {

std::int64_t blocks_taken();
std::int64_t blocks_taken() { return overhead::heap.taken(); }

}  // namespace bench
