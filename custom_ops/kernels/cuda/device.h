// Device primitives used by the kernels. Everything else in this folder is plain C++ on top of
// them, so that the same kernels run on any device that has these primitives: the include path says which
// (nvcc/device_primitives.h, or a device that tests emulate).
#pragma once

#include <cstdint>

#include "launch_plan.h"

namespace bnexport::cuda {

constexpr int kWarp = 32;

// What a load or a store moves, 8 or 16 bytes; the tensor's elements in memory order.
template <int n>
struct alignas(4 * n) Words {
  uint32_t word[n];
};

// What a load says about the future of its line: it will be read again soon, or never.
enum class Reuse { kSoon, kNever };

}  // namespace bnexport::cuda

#include "device_primitives.h"
