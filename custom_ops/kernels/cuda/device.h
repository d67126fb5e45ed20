// Device primitives used by the kernels. Everything else in this folder is plain C++ on top of
// them, so that the same kernels run on any device that has these primitives: the include path says which
// (nvcc/device_primitives.h, or a device that tests emulate).
#pragma once

#include <cstdint>

namespace bnexport::cuda {

constexpr int kWarp = 32;
constexpr int kThreads = 256;  // of every block

// 16 bytes, the widest load; the tensor's elements in memory order.
struct alignas(16) Words {
  uint32_t word[4];
};
// What a block hands to another one: mean and M2 of a part, or its two sums.
struct alignas(16) Pair {
  double first, second;
};

// What a load says about the future of its line: it will be read again soon, or never.
enum class Reuse { kSoon, kNever };

}  // namespace bnexport::cuda

#include "device_primitives.h"
