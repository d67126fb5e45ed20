#include "../../kernels/cpu/training/convolution/convolution.h"

#include <algorithm>
#include <new>

#include "operators.h"

// Convolutions of one to three dimensions: the lists of attributes have a number for each dimension.

namespace bnexport::adapters {

namespace {

using Sizes = std::vector<int64_t>;

constexpr auto kMost = static_cast<int64_t>(schema::kMostSize);

// A run's memory from ONNX Runtime's arena.
class ArenaWorkspace final : public cpu::Workspace {
 public:
  explicit ArenaWorkspace(const Run& run) : api_(run.node.api) {
    const ort::Value* input = nullptr;
    const ort::MemoryInfo* memory = nullptr;
    check(api_, ort::ContextInput::call(api_, run.context, 0, &input));
    check(api_, ort::GetTensorMemoryInfo::call(api_, input, &memory));
    check(api_, ort::ContextAllocator::call(api_, run.context, memory, &allocator_));
  }
  ~ArenaWorkspace() override {
    for (void* piece : pieces_) {
      if (ort::Status* failed = ort::AllocatorFree::call(api_, allocator_, piece))
        ort::ReleaseStatus::call(api_, failed);
    }
    ort::ReleaseAllocator::call(api_, allocator_);
  }
  ArenaWorkspace(const ArenaWorkspace&) = delete;
  ArenaWorkspace& operator=(const ArenaWorkspace&) = delete;

  void* allocate(size_t bytes) override {
    pieces_.reserve(pieces_.size() + 1);
    void* piece = nullptr;
    ort::Status* const failed = ort::AllocatorAlloc::call(api_, allocator_, bytes, &piece);
    if (failed != nullptr) ort::ReleaseStatus::call(api_, failed);
    if (failed != nullptr || piece == nullptr) throw std::bad_alloc();
    pieces_.push_back(piece);
    return piece;
  }

 private:
  ort::Api api_;
  ort::Allocator* allocator_ = nullptr;
  std::vector<void*> pieces_;
};

// As height and width, the last two; one-dimensional ones have height `absent`.
cpu::Pair pair(const Sizes& numbers, int64_t absent) {
  const size_t count = numbers.size();
  return {count == 1 ? absent : numbers[count - 2], numbers[count - 1]};
}

// The first of three.
int64_t depth(const Sizes& numbers, int64_t absent) { return numbers.size() < 3 ? absent : numbers[0]; }

Sizes spatial(const Tensor& tensor) { return {tensor.shape.begin() + 2, tensor.shape.end()}; }

Sizes with_spatial(const Run& run, int64_t first, int64_t second, int64_t slices, const cpu::Pair& extents) {
  const size_t rank = run.node.settings.integers("strides").size();
  if (rank == 1) return {first, second, extents.w};
  if (rank == 2) return {first, second, extents.h, extents.w};
  return {first, second, slices, extents.h, extents.w};
}

// The convolution of x (batch, channels, *in) with w (outputs, channels / groups, *kernel), products in range.
cpu::Convolution convolution(const Run& run, int64_t batch, int64_t channels, int64_t outputs, const Sizes& in,
                             const Sizes& kernel) {
  const Settings& settings = run.node.settings;
  const int64_t group = settings.integer("group");
  cpu::Convolution s{};
  s.batch = batch;
  s.channels = channels;
  s.outputs = outputs;
  s.groups = group;
  s.in = pair(in, 1);
  s.kernel = pair(kernel, 1);
  s.stride = pair(settings.integers("strides"), 1);
  s.padding = pair(settings.integers("pads"), 0);
  s.dilation = pair(settings.integers("dilations"), 1);
  s.depth.in = depth(in, 1);
  s.depth.kernel = depth(kernel, 1);
  s.depth.stride = depth(settings.integers("strides"), 1);
  s.depth.padding = depth(settings.integers("pads"), 0);
  s.depth.dilation = depth(settings.integers("dilations"), 1);
  const auto refuse = [&](const std::string& more, const std::string& expected) {
    run.fail("got channels " + std::to_string(channels) + ", outputs " + std::to_string(outputs) + ", extents " +
             text(in) + ", kernel " + text(kernel) + more + ", expected " + expected);
  };
  if (channels < 1 || outputs < 1 || channels % group != 0 || outputs % group != 0) {
    refuse("", "channels and outputs to be multiples of the group " + std::to_string(group));
  }
  const auto windows = [&](int64_t size, int64_t k, int64_t stride, int64_t padding, int64_t dilation) {
    if (size < 1 || k < 1 || size > kMost || k > kMost) refuse("", "sizes within [1, 2^31)");
    const int64_t room = size + 2 * padding - dilation * (k - 1) - 1;
    if (room < 0) refuse("", "a dilated kernel no larger than the padded extents");
    return room / stride + 1;
  };
  s.depth.out = windows(s.depth.in, s.depth.kernel, s.depth.stride, s.depth.padding, s.depth.dilation);
  s.out = {windows(s.in.h, s.kernel.h, s.stride.h, s.padding.h, s.dilation.h),
           windows(s.in.w, s.kernel.w, s.stride.w, s.padding.w, s.dilation.w)};
  // What kernels may lay out: the padded input, the output, and the kernel's view of either.
  const int64_t most = std::max(channels, outputs);
  if (!fits({batch, most, s.depth.in + 2 * s.depth.padding, s.in.h + 2 * s.padding.h, s.in.w + 2 * s.padding.w}) ||
      !fits({batch, most, s.depth.out, s.out.h, s.out.w}) ||
      !fits({channels, outputs, s.depth.kernel, s.kernel.h, s.kernel.w})) {
    refuse(", batch " + std::to_string(batch), "fewer than 2^60 padded values");
  }
  return s;
}

// The first input is the gradient of the convolution's output.
void require_grad_output(const Run& run, const cpu::Convolution& s) {
  run.require_shape(0, with_spatial(run, s.batch, s.outputs, s.depth.out, s.out), "the output's of this convolution");
}

}  // namespace

void conv(const Run& run) {
  const Tensor &x = run[0], &weight = run[1], &bias = run[2];
  const cpu::Convolution s = convolution(run, x.shape[0], x.shape[1], weight.shape[0], spatial(x), spatial(weight));
  run.require_shape(1, with_spatial(run, s.outputs, s.channels / s.groups, s.depth.kernel, s.kernel),
                    "outputs, channels for each group, kernel");
  if (bias.data != nullptr) run.require_shape(2, {s.outputs}, "one for each output");
  auto* const y = static_cast<float*>(run.output(0, with_spatial(run, s.batch, s.outputs, s.depth.out, s.out)));
  if (s.batch == 0) return;
  ArenaWorkspace workspace(run);
  cpu::convolve(s, x.values(), weight.values(), bias.values(), y, run.parallel, workspace);
}

void conv_input_grad(const Run& run) {
  const Settings& settings = run.node.settings;
  const Tensor &grad = run[0], &weight = run[1];
  if (weight.shape[1] > kMost) run.refuse_shape(1, "sizes below 2^31");
  const cpu::Convolution s = convolution(run, grad.shape[0], weight.shape[1] * settings.integer("group"),
                                         weight.shape[0], settings.integers("input_shape"), spatial(weight));
  require_grad_output(run, s);
  if (!cpu::has_input_gradient(s)) {
    run.fail("got strides " + text(settings.integers("strides")) + " and dilations " +
             text(settings.integers("dilations")) + ", expected 1 in one of the two for each dimension");
  }
  auto* const grad_input = static_cast<float*>(run.output(0, with_spatial(run, s.batch, s.channels, s.depth.in, s.in)));
  if (s.batch == 0) return;
  ArenaWorkspace workspace(run);
  cpu::input_gradient(s, grad.values(), weight.values(), grad_input, run.parallel, workspace);
}

void conv_weight_grad(const Run& run) {
  const Tensor &grad = run[0], &x = run[1];
  const cpu::Convolution s =
      convolution(run, x.shape[0], x.shape[1], grad.shape[1], spatial(x), run.node.settings.integers("kernel_shape"));
  require_grad_output(run, s);
  const Sizes result = with_spatial(run, s.outputs, s.channels / s.groups, s.depth.kernel, s.kernel);
  auto* const grad_weight = static_cast<float*>(run.output(0, result));
  if (s.batch == 0) {
    std::fill_n(grad_weight, count_of(result), 0.0F);
    return;
  }
  ArenaWorkspace workspace(run);
  cpu::weight_gradient(s, grad.values(), x.values(), grad_weight, run.parallel, workspace);
}

}  // namespace bnexport::adapters
