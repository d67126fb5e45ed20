// The inner loops of the training kernels, one table per instruction set. All element counts may be 0.
#pragma once

#include <cstdint>

#include "elementwise.h"
#include "optimizer.h"
#include "pooling.h"

namespace bnexport::cpu {

struct TrainingTable {
  // stream: store past the caches; then outputs are aligned to 64 bytes.
  void (*relu_gradient)(const OpenRange& range, const float* grad, const float* x, float* grad_input, int64_t count,
                        bool stream);
  // Elements [first, first + count).
  void (*adam)(const AdamUpdate& adam, int64_t first, int64_t count, bool stream);
  void (*sgd)(const SgdUpdate& sgd, int64_t first, int64_t count, bool stream);
  // One plane.
  void (*max_pool_gradient)(const MaxPool& pool, const float* grad, const float* x, float* grad_input);
};

// The table for this processor.
const TrainingTable& training_table();

}  // namespace bnexport::cpu
