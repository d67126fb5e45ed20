#include "elementwise.h"

#include "chunks.h"
#include "table.h"

namespace bnexport::cpu {

void relu_gradient(const OpenRange& range, const float* grad, const float* x, float* grad_input, int64_t count,
                   Parallel& parallel) {
  const auto run = training_table().relu_gradient;
  const bool stream = streams(count, 3, {grad_input});
  each_chunk(parallel, count, [&](int64_t first, int64_t length) {
    run(range, grad + first, x + first, grad_input + first, length, stream);
  });
}

}  // namespace bnexport::cpu
