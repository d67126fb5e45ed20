#include "../../kernels/cpu/training/pooling.h"
#include "operators.h"
#include "tensors.h"

namespace bnexport::adapters {

namespace {

cpu::Pair pair(const std::vector<int64_t>& numbers) { return {numbers[0], numbers[1]}; }

// Whether torch makes `out` windows, in either rounding mode. A window starts within the input or before it.
bool makes(int64_t out, int64_t in, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  const int64_t room = in + 2 * padding - dilation * (kernel - 1) - 1;
  if (room < 0) return false;
  const int64_t floor = room / stride + 1;
  return out == floor || (out == floor + 1 && room % stride != 0 && (out - 1) * stride < in + padding);
}

class MaxPoolGradKernel final : public Kernel {
 public:
  explicit MaxPoolGradKernel(const AttributeReader& read)
      : Kernel(read),
        kernel_(pair(read.integers("kernel_shape", 1, 2))),
        stride_(pair(read.integers("strides", 1, 2))),
        padding_(pair(read.integers("pads", 0, 2))),
        dilation_(pair(read.integers("dilations", 1, 2))) {}

  void compute(ort::KernelContext* context) const override {
    const Run run(api_, context, op_, where_);
    const Tensor grad = run.input(0), x = run.input(1);
    if (x.shape.size() != 4) {
      run.fail("input 'input': got shape " + text(x.shape) + ", expected rank 4: (N, C, H, W)");
    }
    const int64_t H = x.shape[2], W = x.shape[3];
    if (!fits({H, W}) || H * W > kMostSize) {
      run.fail("input 'input': got shape " + text(x.shape) + ", expected fewer than 2^31 values in a plane");
    }
    const bool matches = grad.shape.size() == 4 && grad.shape[0] == x.shape[0] && grad.shape[1] == x.shape[1] &&
                         makes(grad.shape[2], H, kernel_.h, stride_.h, padding_.h, dilation_.h) &&
                         makes(grad.shape[3], W, kernel_.w, stride_.w, padding_.w, dilation_.w);
    if (!matches) {
      run.fail("input 'grad_output': got shape " + text(grad.shape) + ", expected that of the pooled 'input' " +
               text(x.shape));
    }
    float* const grad_input = output_values(run, op_, 0, x.shape);
    const cpu::MaxPool pool = {
        x.shape[0] * x.shape[1], {H, W}, {grad.shape[2], grad.shape[3]}, kernel_, stride_, padding_, dilation_};
    SessionParallel parallel(api_, context, threads_);
    cpu::max_pool_gradient(pool, values(grad), values(x), grad_input, parallel);
  }

 private:
  cpu::Pair kernel_{}, stride_{}, padding_{}, dilation_{};
};

}  // namespace

Kernel* make_max_pool_grad(const AttributeReader& read, int32_t) { return new MaxPoolGradKernel(read); }

}  // namespace bnexport::adapters
