// How element-wise work is cut into tasks. Each element is computed alone, so any cut gives the same bits.
#ifndef BNEXPORT_KERNELS_CPU_TRAINING_CHUNKS_H
#define BNEXPORT_KERNELS_CPU_TRAINING_CHUNKS_H

#include <cstdint>
#include <initializer_list>

#include "../../common/math.h"
#include "../parallel.h"
#include "../processor.h"

namespace bnexport::cpu {

// 64 KB of each tensor: stretches that memory delivers at full speed.
constexpr int64_t kChunk = kRun / static_cast<int64_t>(sizeof(float));

// body(first, count)
template <class Body>
void each_chunk(Parallel& parallel, int64_t count, const Body& body) {
  if (count <= kSerial) {
    body(0, count);
    return;
  }
  parallel_for(parallel, ceil_div(count, kChunk), [&](int64_t chunk) {
    const int64_t first = chunk * kChunk;
    body(first, count - first < kChunk ? count - first : kChunk);
  });
}

// Whether `tensors` tensors of `count` floats are too much for the caches, so that outputs are better
// written past them; they have to be aligned for that.
inline bool streams(int64_t count, int64_t tensors, std::initializer_list<const float*> outputs) {
  for (const float* output : outputs) {
    if (reinterpret_cast<uintptr_t>(output) % 64 != 0) return false;
  }
  return !caches().hold(tensors * count * static_cast<int64_t>(sizeof(float)));
}

}  // namespace bnexport::cpu

#endif  // BNEXPORT_KERNELS_CPU_TRAINING_CHUNKS_H
