// Convolutions against their definition in double, over random shapes; memory of the exact size, so that the
// sanitizers see a value read or written past an end, and real threads, so that they see races.
#include "../../custom_ops/kernels/cpu/training/convolution/convolution.h"

#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "allocations.h"
#include "check.h"

using namespace bnexport::cpu;

namespace {

class Threads final : public Parallel {
 public:
  explicit Threads(int64_t width) : width_(width) {}
  void run(int64_t count, Task task, void* context) override {
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(width_));
    for (int64_t t = 0; t < width_; ++t) {
      threads.emplace_back([=] {
        const NoAllocation here;
        for (int64_t i = t; i < count; i += width_) task(context, i);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  int64_t width() const override { return width_; }

 private:
  int64_t width_;
};

class Heap final : public Workspace {
 public:
  void* allocate(size_t bytes) override {
    total += bytes;
    pieces_.push_back(std::make_unique<char[]>(bytes));
    // Signalling values: what is read before it is written shows in the result.
    std::memset(pieces_.back().get(), 0xff, bytes);
    return pieces_.back().get();
  }

  size_t total = 0;

 private:
  std::vector<std::unique_ptr<char[]>> pieces_;
};

using Floats = std::vector<float>;

struct Draw {
  std::mt19937_64 random;
  int64_t of(std::initializer_list<int64_t> choices) {
    return *(choices.begin() + static_cast<std::ptrdiff_t>(random() % choices.size()));
  }
  int64_t up_to(int64_t most) { return 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most)); }
  Floats values(int64_t count) {
    std::normal_distribution<float> normal;
    Floats made(static_cast<size_t>(count));
    for (float& value : made) value = normal(random);
    return made;
  }
};

int64_t extent(int64_t in, int64_t kernel, int64_t stride, int64_t dilation, int64_t padding) {
  const int64_t room = in + 2 * padding - dilation * (kernel - 1) - 1;
  return room < 0 ? 0 : room / stride + 1;
}

// Calls body(output index, input index, weight index) for each product of the convolution.
template <class Body>
void each_product(const Convolution& s, const Body& body) {
  const int64_t ins = s.channels / s.groups, outs = s.outputs / s.groups;
  const Depth& d = s.depth;
  const int64_t out = d.out * s.out.h * s.out.w, kernel = d.kernel * s.kernel.h * s.kernel.w;
  for (int64_t n = 0; n < s.batch; ++n) {
    for (int64_t o = 0; o < s.outputs; ++o) {
      for (int64_t c = 0; c < ins; ++c) {
        for (int64_t i = 0; i < out; ++i) {
          for (int64_t k = 0; k < kernel; ++k) {
            const Pair at = {i / s.out.w % s.out.h, i % s.out.w}, tap = {k / s.kernel.w % s.kernel.h, k % s.kernel.w};
            const int64_t z =
                d.stride * (i / (s.out.h * s.out.w)) + d.dilation * (k / (s.kernel.h * s.kernel.w)) - d.padding;
            const int64_t y = s.stride.h * at.h + s.dilation.h * tap.h - s.padding.h;
            const int64_t x = s.stride.w * at.w + s.dilation.w * tap.w - s.padding.w;
            if (z < 0 || z >= d.in || y < 0 || y >= s.in.h || x < 0 || x >= s.in.w) continue;
            body((n * s.outputs + o) * out + i,
                 (((n * s.channels + o / outs * ins + c) * d.in + z) * s.in.h + y) * s.in.w + x,
                 (o * ins + c) * kernel + k);
          }
        }
      }
    }
  }
}

// A float sum of `terms` products of normal values: its rounding errors, with room for unlucky draws.
void compare(const Floats& got, const std::vector<double>& expected, int64_t terms) {
  const double bound =
      1e-6 * (10 + 2 * std::sqrt(static_cast<double>(terms)) * std::log2(2 + static_cast<double>(terms)));
  for (size_t i = 0; i < got.size(); ++i) CHECK_NEAR(static_cast<double>(got[i]), expected[i], bound);
}

void test(Draw& draw) {
  Convolution s{};
  s.batch = draw.of({1, 2, 3, 8});
  s.groups = draw.of({1, 1, 1, 2, 5, 16});
  const bool depthwise = draw.of({0, 0, 1}) == 1;
  s.channels = s.groups * (depthwise ? 1 : draw.of({1, 2, 3, 9}));
  s.outputs = s.groups * (depthwise ? 1 : draw.of({1, 2, 7, 33, 50}));
  s.in = {draw.up_to(12), draw.up_to(30)};
  s.kernel = {draw.of({1, 1, 2, 3, 5}), draw.of({1, 1, 2, 3, 5})};
  s.stride = {draw.of({1, 1, 2, 3}), draw.of({1, 1, 2, 3})};
  s.dilation = {draw.of({1, 1, 2}), draw.of({1, 1, 2})};
  s.padding = {draw.of({0, 1, 2, 4}), draw.of({0, 1, 2, 4})};
  s.out = {extent(s.in.h, s.kernel.h, s.stride.h, s.dilation.h, s.padding.h),
           extent(s.in.w, s.kernel.w, s.stride.w, s.dilation.w, s.padding.w)};
  if (draw.of({0, 0, 1}) == 1) {
    s.depth = {draw.up_to(6), 0, draw.of({1, 2, 3}), draw.of({1, 1, 2}), draw.of({1, 1, 2}), draw.of({0, 1, 2})};
    s.in = {1 + s.in.h / 2, 1 + s.in.w / 2};
    s.out = {extent(s.in.h, s.kernel.h, s.stride.h, s.dilation.h, s.padding.h),
             extent(s.in.w, s.kernel.w, s.stride.w, s.dilation.w, s.padding.w)};
    s.depth.out = extent(s.depth.in, s.depth.kernel, s.depth.stride, s.depth.dilation, s.depth.padding);
  }
  const int64_t pixels_in = s.depth.in * s.in.h * s.in.w, pixels_out = s.depth.out * s.out.h * s.out.w;
  if (pixels_out == 0) return;
  const int64_t taps = s.depth.kernel * s.kernel.h * s.kernel.w, ins = s.channels / s.groups;
  const Floats x = draw.values(s.batch * s.channels * pixels_in), weight = draw.values(s.outputs * ins * taps);
  const Floats bias = draw.values(s.outputs), grad = draw.values(s.batch * s.outputs * pixels_out);
  const bool has_bias = draw.of({0, 1}) == 1;

  std::vector<double> y(grad.size()), dx(x.size()), dw(weight.size());
  const auto plane = static_cast<size_t>(pixels_out);
  for (size_t i = 0; has_bias && i < y.size(); ++i) {
    y[i] = static_cast<double>(bias[i / plane % static_cast<size_t>(s.outputs)]);
  }
  each_product(s, [&](int64_t out, int64_t in, int64_t w) {
    const auto o = static_cast<size_t>(out), i = static_cast<size_t>(in), k = static_cast<size_t>(w);
    y[o] += static_cast<double>(weight[k]) * static_cast<double>(x[i]);
    dx[i] += static_cast<double>(weight[k]) * static_cast<double>(grad[o]);
    dw[k] += static_cast<double>(x[i]) * static_cast<double>(grad[o]);
  });

  Floats first[3];
  for (const int64_t width : {1, 3}) {
    Threads threads(width);
    Floats results[3] = {Floats(y.size(), NAN), Floats(dx.size(), NAN), Floats(dw.size(), NAN)};
    Heap memory[3];
    convolve(s, x.data(), weight.data(), has_bias ? bias.data() : nullptr, results[0].data(), threads, memory[0]);
    compare(results[0], y, ins * taps);
    if (has_input_gradient(s)) {
      input_gradient(s, grad.data(), weight.data(), results[1].data(), threads, memory[1]);
      compare(results[1], dx, s.outputs / s.groups * taps);
    }
    weight_gradient(s, grad.data(), x.data(), results[2].data(), threads, memory[2]);
    compare(results[2], dw, s.batch * pixels_out);
    for (int i = 0; i < 3; ++i) {
      if (width == 1) first[i] = results[i];
      CHECK(std::memcmp(first[i].data(), results[i].data(), first[i].size() * sizeof(float)) == 0);
    }
  }
}

// Groups of few channels: memory in proportion to the tensors, not to the width of a panel.
void test_memory_of_groups() {
  Convolution s{};
  s.batch = 2;
  s.groups = 32;
  s.channels = s.outputs = 128;
  s.in = s.out = {28, 28};
  s.kernel = {3, 3};
  s.stride = s.dilation = s.padding = {1, 1};
  Draw draw{std::mt19937_64(2)};
  const Floats x = draw.values(s.batch * s.channels * 28 * 28), weight = draw.values(int64_t{128} * 4 * 9);
  Floats result(x.size());
  for (const int kernel : {3, 1}) {
    s.kernel = {kernel, kernel};
    s.padding = {kernel / 2, kernel / 2};
    Threads threads(2);
    Heap memory[3];
    convolve(s, x.data(), weight.data(), nullptr, result.data(), threads, memory[0]);
    input_gradient(s, x.data(), weight.data(), result.data(), threads, memory[1]);
    weight_gradient(s, x.data(), x.data(), result.data(), threads, memory[2]);
    const size_t tensor = x.size() * sizeof(float), some = size_t{1} << 20;  // padded once; blocks of each thread
    CHECK(memory[0].total < 3 * tensor / 2 + some);
    CHECK(memory[1].total < 3 * tensor / 2 + some);
    CHECK(memory[2].total < (kernel == 1 ? 4 : 1) * tensor + tensor / 2 + some);
  }
}

}  // namespace

// test_convolution [cases]: fewer of them in an emulator.
int main(int count, char** arguments) {
  test_memory_of_groups();
  Draw draw{std::mt19937_64(1)};
  const int64_t cases = count > 1 ? std::strtoll(arguments[1], nullptr, 10) : 400;
  for (int64_t i = 0; i < cases; ++i) test(draw);
  return 0;
}
