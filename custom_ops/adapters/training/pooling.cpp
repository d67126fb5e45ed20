#include "../../kernels/cpu/training/pooling.h"

#include "operators.h"

namespace bnexport::adapters {

namespace {

// Whether torch makes `out` windows, in either rounding mode. A window starts within the input or before it.
bool makes(int64_t out, int64_t in, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  const int64_t room = in + 2 * padding - dilation * (kernel - 1) - 1;
  if (room < 0) return false;
  const int64_t floor = room / stride + 1;
  return out == floor || (out == floor + 1 && room % stride != 0 && (out - 1) * stride < in + padding);
}

}  // namespace

void max_pool_grad(const Run& run) {
  const std::vector<int64_t>&grad = run[0].shape, &x = run[1].shape;
  if (x.size() != 4) run.refuse_shape(1, "rank 4: (N, C, H, W)");
  if (!fits({x[2], x[3]}) || x[2] * x[3] > static_cast<int64_t>(schema::kMostSize)) {
    run.refuse_shape(1, "fewer than 2^31 values in a plane");
  }
  const auto pair = [&](const char* name) {
    const std::vector<int64_t>& numbers = run.node.settings.integers(name);
    return cpu::Pair{numbers[0], numbers[1]};
  };
  cpu::MaxPool pool = {x[0] * x[1],  {x[2], x[3]},     {}, pair("kernel_shape"), pair("strides"),
                       pair("pads"), pair("dilations")};
  if (grad.size() != 4 || grad[0] != x[0] || grad[1] != x[1] ||
      !makes(grad[2], x[2], pool.kernel.h, pool.stride.h, pool.padding.h, pool.dilation.h) ||
      !makes(grad[3], x[3], pool.kernel.w, pool.stride.w, pool.padding.w, pool.dilation.w)) {
    run.refuse_shape(0, "that of the pooled 'input' " + text(x));
  }
  pool.out = {grad[2], grad[3]};
  cpu::max_pool_gradient(pool, run[0].values(), run[1].values(), run.output_values(0), run.parallel);
}

}  // namespace bnexport::adapters
