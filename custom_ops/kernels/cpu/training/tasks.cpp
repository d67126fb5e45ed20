// How the work of the small training kernels is cut into tasks. Each element, and each plane of a pooling, is computed
// alone, so any cut gives the same bits.
#include <initializer_list>

#include "../../common/math.h"
#include "../processor.h"
#include "table.h"

namespace bnexport::cpu {

namespace {

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
bool streams(int64_t count, int64_t tensors, std::initializer_list<const float*> outputs) {
  for (const float* output : outputs) {
    if (reinterpret_cast<uintptr_t>(output) % 64 != 0) return false;
  }
  return !caches().hold(tensors * count * static_cast<int64_t>(sizeof(float)));
}

}  // namespace

void relu_gradient(const OpenRange& range, const float* grad, const float* x, float* grad_input, int64_t count,
                   Parallel& parallel) {
  const auto run = training_table().relu_gradient;
  const bool stream = streams(count, 3, {grad_input});
  each_chunk(parallel, count, [&](int64_t first, int64_t length) {
    run(range, grad + first, x + first, grad_input + first, length, stream);
  });
}

void update(const AdamUpdate& adam, int64_t count, Parallel& parallel) {
  const auto run = training_table().adam;
  const bool stream =
      streams(count, 7, {adam.new_parameter, adam.new_exp_avg, adam.new_exp_avg_sq, adam.new_max_exp_avg_sq});
  each_chunk(parallel, count, [&](int64_t first, int64_t length) { run(adam, first, length, stream); });
}

void update(const SgdUpdate& sgd, int64_t count, Parallel& parallel) {
  const auto run = training_table().sgd;
  const bool stream = streams(count, 5, {sgd.new_parameter, sgd.new_momentum_buffer});
  each_chunk(parallel, count, [&](int64_t first, int64_t length) { run(sgd, first, length, stream); });
}

void max_pool_gradient(const MaxPool& pool, const float* grad, const float* x, float* grad_input, Parallel& parallel) {
  const int64_t in = pool.in.h * pool.in.w, out = pool.out.h * pool.out.w;
  if (pool.planes == 0 || in == 0) return;
  const auto run = training_table().max_pool_gradient;
  // A window's value is compared once for each of its positions: a plane costs more than its size.
  const int64_t planes = in < kSerial ? kSerial / in : 1;
  parallel_for(parallel, ceil_div(pool.planes, planes), [&](int64_t task) {
    const int64_t last = (task + 1) * planes < pool.planes ? (task + 1) * planes : pool.planes;
    for (int64_t plane = task * planes; plane < last; ++plane) {
      run(pool, grad + plane * out, x + plane * in, grad_input + plane * in);
    }
  });
}

}  // namespace bnexport::cpu
