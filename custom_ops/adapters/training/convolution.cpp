#include <algorithm>

#include "../../kernels/cpu/training/convolution/convolution.h"
#include "operators.h"
#include "tensors.h"

namespace bnexport::adapters {

namespace {

// One- and two-dimensional convolutions. The lists of attributes have a number for each dimension.
class ConvolutionKernel : public Kernel {
 protected:
  explicit ConvolutionKernel(const AttributeReader& read)
      : Kernel(read),
        strides_(read.integers("strides", 1, 0)),
        pads_(read.integers("pads", 0, strides_.size())),
        dilations_(read.integers("dilations", 1, strides_.size())),
        group_(read.integer("group", 1, kMostSize)) {}

  size_t rank() const { return strides_.size(); }
  // One number for each dimension as height and width; one-dimensional ones have height `absent`.
  cpu::Pair pair(const std::vector<int64_t>& numbers, int64_t absent) const {
    return numbers.size() == 1 ? cpu::Pair{absent, numbers[0]} : cpu::Pair{numbers[0], numbers[1]};
  }
  std::vector<int64_t> spatial(const Tensor& tensor) const { return {tensor.shape.begin() + 2, tensor.shape.end()}; }
  std::vector<int64_t> with_spatial(int64_t first, int64_t second, const cpu::Pair& extents) const {
    if (rank() == 1) return {first, second, extents.w};
    return {first, second, extents.h, extents.w};
  }
  // An input of rank 2 + rank().
  Tensor tensor(const Run& run, size_t index) const {
    Tensor found = run.input(index);
    if (found.shape.size() != 2 + rank()) {
      run.fail(std::string("input '") + op_.inputs[index].name + "': got shape " + text(found.shape) +
               ", expected rank " + std::to_string(2 + rank()) + ", as 'strides' has " + std::to_string(rank()) +
               (rank() == 1 ? " number" : " numbers"));
    }
    return found;
  }
  // From x (batch, channels, *in) and w (outputs, channels / groups, *kernel), all checked, products in range.
  cpu::Convolution shape(const Run& run, int64_t batch, int64_t channels, int64_t outputs,
                         const std::vector<int64_t>& in, const std::vector<int64_t>& kernel) const {
    cpu::Convolution s{};
    s.batch = batch;
    s.channels = channels;
    s.outputs = outputs;
    s.groups = group_;
    s.in = pair(in, 1);
    s.kernel = pair(kernel, 1);
    s.stride = pair(strides_, 1);
    s.padding = pair(pads_, 0);
    s.dilation = pair(dilations_, 1);
    const std::string sizes = "channels " + std::to_string(channels) + ", outputs " + std::to_string(outputs) +
                              ", extents " + text(in) + ", kernel " + text(kernel);
    if (channels < 1 || outputs < 1 || channels % group_ != 0 || outputs % group_ != 0) {
      run.fail("got " + sizes + ", expected channels and outputs to be multiples of the group " +
               std::to_string(group_));
    }
    const auto windows = [&](int64_t size, int64_t k, int64_t stride, int64_t padding, int64_t dilation) {
      if (size < 1 || k < 1 || size > kMostSize || k > kMostSize)
        run.fail("got " + sizes + ", expected sizes within [1, 2^31)");
      const int64_t room = size + 2 * padding - dilation * (k - 1) - 1;
      if (room < 0) run.fail("got " + sizes + ", expected a dilated kernel no larger than the padded extents");
      return room / stride + 1;
    };
    s.out = {windows(s.in.h, s.kernel.h, s.stride.h, s.padding.h, s.dilation.h),
             windows(s.in.w, s.kernel.w, s.stride.w, s.padding.w, s.dilation.w)};
    // What kernels may lay out: the padded input, the output, and the kernel's view of either.
    const int64_t most = std::max(channels, outputs);
    if (!fits({s.batch, most, s.in.h + 2 * s.padding.h, s.in.w + 2 * s.padding.w}) ||
        !fits({s.batch, most, s.out.h, s.out.w}) || !fits({channels, outputs, s.kernel.h, s.kernel.w})) {
      run.fail("got " + sizes + ", batch " + std::to_string(batch) + ", expected fewer than 2^60 padded values");
    }
    return s;
  }
  // Fails unless the input `index`, g, has shape (batch, outputs, *out).
  void require_output_shape(const Run& run, size_t index, const Tensor& g, const cpu::Convolution& shape) const {
    require_shape(run, op_, index, g, with_spatial(shape.batch, shape.outputs, shape.out),
                  "the output's of this convolution");
  }

  std::vector<int64_t> strides_, pads_, dilations_;
  int64_t group_;
};

class ConvKernel final : public ConvolutionKernel {
 public:
  explicit ConvKernel(const AttributeReader& read) : ConvolutionKernel(read) {}
  void compute(ort::KernelContext* context) const override;
};

class ConvInputGradKernel final : public ConvolutionKernel {
 public:
  explicit ConvInputGradKernel(const AttributeReader& read)
      : ConvolutionKernel(read), input_shape_(read.integers("input_shape", 1, rank())) {}
  void compute(ort::KernelContext* context) const override {
    const Run run(api_, context, op_, where_);
    const Tensor grad = tensor(run, 0), weight = tensor(run, 1);
    if (weight.shape[1] > kMostSize)
      run.fail("input 'weight': got shape " + text(weight.shape) + ", expected sizes below 2^31");
    const cpu::Convolution s =
        shape(run, grad.shape[0], weight.shape[1] * group_, weight.shape[0], input_shape_, spatial(weight));
    require_output_shape(run, 0, grad, s);
    if (!cpu::has_input_gradient(s)) {
      run.fail("got strides " + text(strides_) + " and dilations " + text(dilations_) +
               ", expected 1 in one of the two for each dimension");
    }
    float* const grad_input = output_values(run, op_, 0, with_spatial(s.batch, s.channels, s.in));
    if (s.batch == 0) return;
    SessionParallel parallel(api_, context, threads_);
    ArenaWorkspace workspace(api_, context);
    cpu::input_gradient(s, values(grad), values(weight), grad_input, parallel, workspace);
  }

 private:
  std::vector<int64_t> input_shape_;
};

class ConvWeightGradKernel final : public ConvolutionKernel {
 public:
  explicit ConvWeightGradKernel(const AttributeReader& read)
      : ConvolutionKernel(read), kernel_shape_(read.integers("kernel_shape", 1, rank())) {}
  void compute(ort::KernelContext* context) const override {
    const Run run(api_, context, op_, where_);
    const Tensor grad = tensor(run, 0), x = tensor(run, 1);
    const cpu::Convolution s = shape(run, x.shape[0], x.shape[1], grad.shape[1], spatial(x), kernel_shape_);
    require_output_shape(run, 0, grad, s);
    const std::vector<int64_t> result = with_spatial(s.outputs, s.channels / s.groups, s.kernel);
    float* const grad_weight = output_values(run, op_, 0, result);
    if (s.batch == 0) {
      std::fill_n(grad_weight, count_of(result), 0.0F);
      return;
    }
    SessionParallel parallel(api_, context, threads_);
    ArenaWorkspace workspace(api_, context);
    cpu::weight_gradient(s, values(grad), values(x), grad_weight, parallel, workspace);
  }

 private:
  std::vector<int64_t> kernel_shape_;
};

void ConvKernel::compute(ort::KernelContext* context) const {
  const Run run(api_, context, op_, where_);
  const Tensor x = tensor(run, 0), weight = tensor(run, 1), bias = run.input(2);
  const cpu::Convolution s = shape(run, x.shape[0], x.shape[1], weight.shape[0], spatial(x), spatial(weight));
  require_shape(run, op_, 1, weight, with_spatial(s.outputs, s.channels / s.groups, s.kernel),
                "outputs, channels for each group, kernel");
  if (bias.present) require_shape(run, op_, 2, bias, {s.outputs}, "one for each output");
  float* const y = output_values(run, op_, 0, with_spatial(s.batch, s.outputs, s.out));
  if (s.batch == 0) return;
  SessionParallel parallel(api_, context, threads_);
  ArenaWorkspace workspace(api_, context);
  cpu::convolve(s, values(x), values(weight), values(bias), y, parallel, workspace);
}

}  // namespace

Kernel* make_conv(const AttributeReader& read, int32_t) { return new ConvKernel(read); }
Kernel* make_conv_input_grad(const AttributeReader& read, int32_t) { return new ConvInputGradKernel(read); }
Kernel* make_conv_weight_grad(const AttributeReader& read, int32_t) { return new ConvWeightGradKernel(read); }

}  // namespace bnexport::adapters
