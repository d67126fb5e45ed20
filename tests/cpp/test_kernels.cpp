// The kernels through the C API against a naive reference: every type, both layouts, shapes at the edges
// of blocks, vectors and tasks. Run under sanitizers, and once for each instruction set.
#include <algorithm>
#include <thread>

#include "../../custom_ops/kernels/cpu/batch_norm/kernels.h"
#include "allocations.h"
#include "check.h"
#include "tensors.h"

using namespace bnexport;

namespace {

constexpr double kEps = 1e-3;

// Small multiples of 1/16, which every type holds.
void fill(Buffer& buffer, uint32_t seed) {
  std::mt19937 random(seed);
  for (int64_t i = 0; i < buffer.count(); ++i)
    buffer.set(i, static_cast<double>(static_cast<int>(random() % 129) - 32) / 16);
}

void call(int code, const char* error) { check(code == 0, __FILE__, __LINE__, error); }

void run(const bnexport_forward& params) {
  char error[256] = "";
  call(bnexport_cpu_forward(&params, error, sizeof(error)), error);
}

void run(const bnexport_backward& params) {
  char error[256] = "";
  call(bnexport_cpu_backward(&params, error, sizeof(error)), error);
}

void test_shape(const Shape& shape, int32_t dtype, int32_t layout, int threads) {
  const int64_t C = shape.C;
  const double u = roundoff(dtype), u_s = statistics_roundoff(dtype);
  Buffer x(dtype, shape.elements()), dy(dtype, shape.elements()), y(x), dx(x);
  fill(x, 1);
  fill(dy, 2);
  std::vector<double> saved(static_cast<size_t>(2 * C)), weight(static_cast<size_t>(C)), bias(weight), mean(weight),
      var(weight), new_mean(weight), new_var(weight), dweight(weight), dbias(weight);
  for (int64_t c = 0; c < C; ++c) {
    const auto at = static_cast<size_t>(c);
    weight[at] = 0.5 + static_cast<double>(c % 5);
    bias[at] = static_cast<double>(c % 3) - 1;
    mean[at] = 1;
    var[at] = 2;
  }
  auto p = params_of<bnexport_forward>(shape, dtype, layout, x, y, saved, threads);
  p.weight = weight.data();
  p.bias = bias.data();
  p.running_mean = mean.data();
  p.running_var = var.data();
  p.running_mean_out = new_mean.data();
  p.running_var_out = new_var.data();
  run(p);
  auto b = params_of<bnexport_backward>(shape, dtype, layout, x, dx, saved, threads);
  b.dy = dy.data();
  b.weight = weight.data();
  b.dweight = dweight.data();
  b.dbias = dbias.data();
  run(b);
  Buffer same_x(x), same_dy(dy);
  p.x = p.y = same_x.data();
  b.dy = b.dx = same_dy.data();
  run(p);
  run(b);
  CHECK(same_x.same_bits(y) && same_dy.same_bits(dx));
  const auto n = static_cast<double>(shape.N * shape.S);
  for (int64_t c = 0; c < C; ++c) {
    const auto at = static_cast<size_t>(c);
    Reference exact({shape}, layout, std::vector<const Buffer*>{&x}, c);
    exact.add_gradient(shape, layout, x, dy, 1 / std::sqrt(exact.variance + static_cast<long double>(kEps)), c);
    const auto mean_c = static_cast<double>(exact.mean), variance = static_cast<double>(exact.variance);
    const auto sum = static_cast<double>(exact.dy), product = static_cast<double>(exact.dy_x_hat);
    const double invstd = 1 / std::sqrt(variance + kEps), scale = weight[at] * invstd;
    CHECK_NEAR(saved[at], mean_c, 32 * u_s * 8);
    CHECK_NEAR(saved[static_cast<size_t>(C + c)], invstd, 64 * u_s * invstd);
    CHECK_NEAR(new_mean[at], 0.75 * mean[at] + 0.25 * mean_c, 64 * u_s * 8);
    CHECK_NEAR(new_var[at], 0.75 * var[at] + 0.25 * variance * (n > 1 ? n / (n - 1) : 1), 64 * u_s * 16);
    CHECK_NEAR(dbias[at], sum, 16 * u_s * n * 8);
    CHECK_NEAR(dweight[at], product, 16 * u_s * n * 8 * (1 + 6 * invstd));
    for (int64_t i = 0; i < shape.N; ++i) {
      for (int64_t k = 0; k < shape.S; ++k) {
        const int64_t where = shape.at(layout, i, c, k);
        const double x_hat = (x.get(where) - mean_c) * invstd, expected = weight[at] * x_hat + bias[at];
        CHECK_NEAR(y.get(where), expected, 2 * u * std::fabs(expected) + 64 * u_s * weight[at] * (1 + 6 * invstd));
        const double slope = scale * (dy.get(where) - (sum + x_hat * product) / n);
        CHECK_NEAR(dx.get(where), slope,
                   2 * u * std::fabs(slope) + 128 * u_s * scale * 8 * (1 + 6 * invstd) * (1 + 6 * invstd));
      }
    }
  }
}

void test_shapes(int64_t most) {
  const Shape shapes[] = {// clang-format off
      {1, 1, 1}, {2, 1, 15}, {2, 3, 16}, {3, 2, 17}, {1, 2, 31}, {2, 5, 33}, {5, 7, 49}, {300, 2, 3}, {9, 70, 1}, {130, 3, 1},
      {2, 2, 4096}, {1, 2, 4097}, {1, 1, 8197}, {2, 40, 100}, {3, 64, 64}, {65, 2, 64}, {4, 1, 513}, {1, 3, 33000},
      {1, 200, 2}, {7, 1, 5},
      // Columns: odd widths, more than a band, folded to whole lines, chunks and a rest.
      {3, 100, 37}, {20, 1100, 1}, {3, 1500, 5}, {2, 49, 1300}, {9, 3, 2500}, {150, 700, 3}};
  // clang-format on
  for (const Shape& shape : shapes) {
    if (shape.elements() > most) continue;
    for (int32_t dtype = 0; dtype < 4; ++dtype) {
      for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
        for (const int threads : {1, 3}) test_shape(shape, dtype, layout, threads);
      }
    }
  }
}

// With mean 0, variance 1 and eps 0 the output is the input: every 16-bit pattern, there and back.
void test_every_half() {
  for (const int32_t dtype : {BNEXPORT_FLOAT16, BNEXPORT_BFLOAT16}) {
    for (const int64_t S : {int64_t{1} << 16, int64_t{1}}) {  // rows, then columns
      const Shape shape{(int64_t{1} << 16) / S, 1, S};
      Buffer x(dtype, 1 << 16), y(dtype, 1 << 16);
      auto* patterns = static_cast<unsigned char*>(x.data());
      for (int64_t i = 0; i < 1 << 16; ++i) {
        const auto pattern = static_cast<uint16_t>(i);
        std::memcpy(patterns + 2 * i, &pattern, 2);
      }
      std::vector<double> saved(2), zero(1, 0.0), one(1, 1.0);
      auto p = params_of<bnexport_forward>(shape, dtype, BNEXPORT_NCS, x, y, saved, 1);
      p.training = 0;
      p.eps = 0;
      p.running_mean = zero.data();
      p.running_var = one.data();
      run(p);
      for (int64_t i = 0; i < 1 << 16; ++i) {
        if (std::isnan(x.get(i))) {
          CHECK(std::isnan(y.get(i)));
        } else {
          CHECK(x.get(i) == y.get(i));
        }
      }
    }
  }
}

void test_past_the_shared_cache() {
  const Shape shape{3, 70, 100003};  // 84 MB: streaming stores at every alignment
  Buffer x(BNEXPORT_FLOAT32, shape.elements()), y(BNEXPORT_FLOAT32, shape.elements());
  fill(x, 3);
  std::vector<double> saved(static_cast<size_t>(2 * shape.C));
  run(params_of<bnexport_forward>(shape, BNEXPORT_FLOAT32, BNEXPORT_NCS, x, y, saved, 2));
  for (const int64_t c : {int64_t{0}, int64_t{37}, int64_t{69}}) {
    const Reference exact({shape}, BNEXPORT_NCS, std::vector<const Buffer*>{&x}, c);
    for (int64_t k = 0; k < shape.S; k += 7) {
      const int64_t where = shape.at(BNEXPORT_NCS, 1, c, k);
      CHECK_NEAR(
          y.get(where),
          (x.get(where) - static_cast<double>(exact.mean)) / std::sqrt(static_cast<double>(exact.variance) + kEps),
          1e-5);
    }
  }
}

// Serial tasks in which nothing may be allocated.
class Tasks final : public cpu::Parallel {
 public:
  void run(int64_t count, Task task, void* context) override {
    const NoAllocation here;
    for (int64_t i = 0; i < count; ++i) task(context, i);
  }
  int64_t width() const override { return 4; }
};

void test_tasks_allocate_nothing() {
  for (const Shape& shape : {Shape{8, 64, 784}, Shape{2, 3, 40000}, Shape{20, 1100, 1}, Shape{300, 100, 9}}) {
    for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
      Buffer x(BNEXPORT_FLOAT32, shape.elements()), y(BNEXPORT_FLOAT32, shape.elements());
      fill(x, 4);
      std::vector<double> saved(static_cast<size_t>(2 * shape.C)), row(static_cast<size_t>(2 * shape.C + 1));
      const auto p = params_of<bnexport_forward>(shape, BNEXPORT_FLOAT32, layout, x, y, saved, 1);
      const auto b = params_of<bnexport_backward>(shape, BNEXPORT_FLOAT32, layout, x, y, saved, 1);
      Tasks tasks;
      cpu::forward(p, tasks);
      cpu::forward_row(p, tasks, row.data());
      cpu::backward(b, tasks);
      cpu::backward_row(b, tasks, row.data());
    }
  }
}

// Several threads of the program at once; each must get its own result.
void test_concurrent_callers() {
  const Shape shape{4, 16, 900};
  std::vector<std::thread> callers;
  callers.reserve(4);
  for (uint32_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&shape, caller] {
      Buffer x(BNEXPORT_FLOAT32, shape.elements()), y(BNEXPORT_FLOAT32, shape.elements()),
          first(BNEXPORT_FLOAT32, shape.elements());
      fill(x, caller);
      std::vector<double> saved(static_cast<size_t>(2 * shape.C));
      run(params_of<bnexport_forward>(shape, BNEXPORT_FLOAT32, BNEXPORT_NCS, x, first, saved, 1));
      for (int round = 0; round < 50; ++round) {
        run(params_of<bnexport_forward>(shape, BNEXPORT_FLOAT32, BNEXPORT_NCS, x, y, saved, 4));
        CHECK(y.same_bits(first));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// Stands for a program's OpenMP runtime.
void threads_of_the_program(void (*body)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned t = 1; t < threads; ++t) others.emplace_back(body, data);
  body(data);
  for (std::thread& other : others) other.join();
}

}  // namespace

// test_kernels [elements]: only shapes of at most that many, for an emulator.
int main(int count, char** arguments) {
  bnexport_lend_openmp(reinterpret_cast<void*>(threads_of_the_program));
  test_shapes(count > 1 ? std::strtoll(arguments[1], nullptr, 10) : INT64_MAX);
  test_every_half();
  if (count > 1) return 0;
  test_tasks_allocate_nothing();
  test_concurrent_callers();
  test_past_the_shared_cache();
  std::printf("kernels: ok (%s)\n", bnexport_instruction_set());
  return 0;
}
