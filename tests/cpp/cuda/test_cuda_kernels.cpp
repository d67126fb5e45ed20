// Every kernel, from plan to launch, on the emulated device, against the naive reference: all element
// types, both layouts, shapes at the edges of rows, vectors, tiles and parts.
//
//   test_cuda_kernels [seeds]     orders of threads and blocks to run all cases in (1)
#include <cstdlib>

#include "../../../custom_ops/kernels/common/statistics_definitions.h"
#include "../tensors.h"
#include "emulated_launcher.h"

namespace {

using namespace bnexport::cuda;

constexpr double kEps = 1e-5, kMomentum = 0.25;

struct Case {
  Shape shape;
  int32_t dtype, layout;
  double mean = 0.5;
  int64_t offset = 0;     // of the data, in elements
  bool in_place = false;  // y == x, dx == dy
};

// Few, so that small tensors have several parts, and more parts than a warp has threads.
constexpr int64_t kMultiprocessors = 6;
uint32_t seed = 0;

LaunchPlan plan_of(const Case& test) {
  return launch_plan({test.shape.N, test.shape.C, test.shape.S, test.dtype, test.layout, test.offset == 0},
                     kMultiprocessors);
}

// One workspace for everything; what calls left in it is not for the next one.
unsigned char* workspace_of(const LaunchPlan& plan) {
  static std::vector<double> all;
  all.assign(static_cast<size_t>(plan.workspace) / sizeof(double), NAN);
  return reinterpret_cast<unsigned char*>(all.data());
}

void fill(Buffer& buffer, uint32_t number, double mean, double std) {
  std::mt19937 random(number);
  std::normal_distribution<double> normal(mean, std);
  for (int64_t i = 0; i < buffer.count(); ++i) buffer.set(i, normal(random));
}

// Per-channel arrays of a layer.
struct Layer {
  std::vector<double> weight, bias, mean, var, new_mean, new_var, saved_mean, saved_invstd, dweight, dbias;
  explicit Layer(int64_t channels)
      : weight(static_cast<size_t>(channels)),
        bias(weight),
        mean(weight),
        var(weight),
        new_mean(weight.size(), NAN),
        new_var(new_mean),
        saved_mean(new_mean),
        saved_invstd(new_mean),
        dweight(new_mean),
        dbias(new_mean) {
    for (size_t c = 0; c < weight.size(); ++c) {
      weight[c] = 0.5 + static_cast<double>(c % 5);
      bias[c] = static_cast<double>(c % 3) - 1;
      mean[c] = 1;
      var[c] = 2;
    }
  }
};

// A process with tensors of its own and the calls on them.
struct Process {
  Case test;
  LaunchPlan plan;
  Buffer x, dy, y, dx;
  Layer layer;
  EmulatedLauncher launcher;

  explicit Process(const Case& test) : Process(test, plan_of(test)) {}
  Process(const Case& test, const LaunchPlan& plan)
      : test(test),
        plan(plan),
        x(test.dtype, test.shape.elements(), test.offset * bytes_of(test.dtype)),
        dy(x),
        y(x),
        dx(x),
        layer(test.shape.C) {
    launcher.seed = seed += 1000;
    fill(x, seed, test.mean, 1);
    fill(dy, seed + 1, 0.25, 1);
  }

  bnexport_forward forward() {
    auto p = common<bnexport_forward>();
    p.y = y.data();
    p.bias = layer.bias.data();
    p.running_mean = layer.mean.data();
    p.running_var = layer.var.data();
    p.running_mean_out = layer.new_mean.data();
    p.running_var_out = layer.new_var.data();
    p.momentum = kMomentum;
    p.eps = kEps;
    return p;
  }
  bnexport_backward backward() {
    auto p = common<bnexport_backward>();
    p.dy = dy.data();
    p.dx = dx.data();
    p.dweight = layer.dweight.data();
    p.dbias = layer.dbias.data();
    return p;
  }
  // The statistics' row alone, where there is one.
  void run(const bnexport_forward& p, double* row = nullptr) {
    run_forward(p, plan, workspace_of(plan), launcher, row);
  }
  void run(const bnexport_backward& p, double* row = nullptr) {
    run_backward(p, plan, workspace_of(plan), launcher, row);
  }

 private:
  template <class Params>
  Params common() {
    Params p{};
    p.struct_size = sizeof(p);
    p.dtype = test.dtype;
    p.stats_dtype = BNEXPORT_FLOAT64;
    p.layout = test.layout;
    p.N = test.shape.N;
    p.C = test.shape.C;
    p.S = test.shape.S;
    p.x = x.data();
    p.weight = layer.weight.data();
    p.saved_mean = layer.saved_mean.data();
    p.saved_invstd = layer.saved_invstd.data();
    p.training = 1;
    p.group_size = 1;
    p.threads = 1;
    return p;
  }
};

void check_forward(const Case& test, const Shape& shape, const Buffer& x, const Buffer& y, const Layer& layer,
                   int64_t c, const Reference& r) {
  const auto at = static_cast<size_t>(c);
  const double u = roundoff(test.dtype), u_s = statistics_roundoff(test.dtype);
  const auto mean = static_cast<double>(r.mean), variance = static_cast<double>(r.variance),
             count = static_cast<double>(r.count);
  const double std = std::sqrt(variance), invstd = 1 / std::sqrt(variance + kEps),
               condition = 1 + std::fabs(mean) * invstd;
  const double unbiased = variance * (count > 1 ? count / (count - 1) : 1);
  // Where the std is far below the mean, the data's own rounding is the input's; the result is exact for it.
  CHECK_NEAR(layer.saved_mean[at], mean, 32 * u_s * std + 1e-13 * std::fabs(mean));
  // Means of parts meet in double; for double data, that is where the condition of the data shows.
  const double meeting = test.dtype == BNEXPORT_FLOAT64 ? condition : 1;
  CHECK_NEAR(layer.saved_invstd[at], invstd, 32 * u_s * invstd * meeting);
  const double new_mean = (1 - kMomentum) * layer.mean[at] + kMomentum * mean,
               new_var = (1 - kMomentum) * layer.var[at] + kMomentum * unbiased;
  CHECK_NEAR(layer.new_mean[at], new_mean, 32 * u_s * (std::max(std::fabs(new_mean), 1.0) + std));
  CHECK_NEAR(layer.new_var[at], new_var, 32 * u_s * std::max(new_var, 2.0) * meeting);
  shape.each(test.layout, c, [&](int64_t i) {
    const double expected = (x.get(i) - mean) * layer.weight[at] * invstd + layer.bias[at];
    CHECK_NEAR(y.get(i), expected,
               (2 * u + 4 * u_s) * std::fabs(expected) + 32 * u_s * condition * std::max(1.0, layer.weight[at]));
  });
}

void check_gradient(const Case& test, const Shape& shape, const Buffer& x, const Buffer& dy, const Buffer& dx,
                    const Layer& layer, int64_t c, const Reference& group, const Reference& local) {
  const auto at = static_cast<size_t>(c);
  const double u = roundoff(test.dtype), u_s = statistics_roundoff(test.dtype), mean = static_cast<double>(group.mean);
  const double invstd = layer.saved_invstd[at], condition = 1 + std::fabs(mean) * invstd,
               scale = layer.weight[at] * invstd;
  const auto n = static_cast<double>(group.count), sum = static_cast<double>(group.dy),
             product = static_cast<double>(group.dy_x_hat);
  CHECK_NEAR(layer.dbias[at], static_cast<double>(local.dy),
             16 * u_s * condition * static_cast<double>(local.absolute_dy) + u_s * std::fabs(layer.dbias[at]));
  CHECK_NEAR(layer.dweight[at], static_cast<double>(local.dy_x_hat),
             16 * u_s * condition * static_cast<double>(local.absolute_dy_x_hat) + u_s * std::fabs(layer.dweight[at]));
  double largest = 0;
  shape.each(test.layout, c, [&](int64_t i) { largest = std::max(largest, std::fabs(dy.get(i))); });
  shape.each(test.layout, c, [&](int64_t i) {
    const double x_hat = (x.get(i) - mean) * invstd, expected = scale * (dy.get(i) - (sum + x_hat * product) / n);
    CHECK_NEAR(dx.get(i), expected, 2 * u * std::fabs(expected) + 64 * u_s * condition * scale * largest);
  });
}

void test_case(const Case& test) {
  Process one(test);
  Buffer &result = test.in_place ? one.x : one.y, &gradient = test.in_place ? one.dy : one.dx;
  const Buffer x_before(one.x), dy_before(one.dy);
  bnexport_forward p = one.forward();
  p.y = result.data();
  one.run(p);
  CHECK(one.launcher.launches == 3);
  const Buffer output(result);
  if (test.in_place) one.x = x_before;
  CHECK(one.x.same_bits(x_before) && output.guards_hold());

  bnexport_backward b = one.backward();
  b.dx = gradient.data();
  one.run(b);
  CHECK(one.launcher.launches == 6);
  CHECK(one.x.same_bits(x_before) && gradient.guards_hold() && (test.in_place || one.dy.same_bits(dy_before)));
  for (int64_t c = 0; c < test.shape.C; ++c) {
    Reference r({test.shape}, test.layout, std::vector<const Buffer*>{&one.x}, c);
    check_forward(test, test.shape, one.x, output, one.layer, c, r);
    r.add_gradient(test.shape, test.layout, one.x, dy_before,
                   static_cast<long double>(one.layer.saved_invstd[static_cast<size_t>(c)]), c);
    check_gradient(test, test.shape, one.x, dy_before, gradient, one.layer, c, r, r);
  }

  // Another order of threads and blocks, the same bits.
  const Buffer first(gradient);
  Buffer again(one.y);
  again.poison();
  gradient.poison();
  one.dy = dy_before;
  p.y = again.data();
  one.run(p);
  one.run(b);
  CHECK(again.same_bits(output) && gradient.same_bits(first));
}

void test_shapes() {
  const Shape shapes[] = {{1, 1, 1},    {2, 3, 1},   {65, 5, 1},  {3, 8, 2},   {2, 1, 49}, {5, 65, 49},
                          {7, 3, 64},   {2, 4, 16},  {4, 5, 15},  {33, 2, 17}, {1, 1, 8},  {40, 16, 9},
                          {3, 2, 4097}, {2, 9, 900}, {9, 64, 36}, {6, 7, 31},  {1, 6, 31}, {2, 130, 100}};
  int index = 0;
  for (const Shape& shape : shapes) {
    for (int32_t dtype = 0; dtype < 4; ++dtype) {
      for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
        Case test{shape, dtype, layout};
        test.in_place = ++index % 3 == 0;
        test_case(test);
        test.offset = 1;  // data that no vector fits
        if (index % 2 == 0) test_case(test);
      }
    }
  }
}

// Channels of many parts, a different number for each kind of vector; the last ones are shorter.
void test_many_parts() {
  for (int32_t dtype = 0; dtype < 4; ++dtype) {
    for (const Shape& shape : {Shape{3, 2, 11111}, Shape{3, 4, 22400}}) {
      for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
        const Case test{shape, dtype, layout};
        CHECK(plan_of(test).parts > 1);
        test_case(test);
      }
    }
  }
}

// With one channel, more parts than a block has threads: as planned for 40 multiprocessors.
void test_more_parts_than_threads() {
  for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
    const Shape shape = layout == BNEXPORT_NCS ? Shape{1, 1, 300000} : Shape{300000, 2, 1};
    const Case test{shape, BNEXPORT_FLOAT64, layout, 3};
    Process one(test,
                launch_plan({shape.N, shape.C, shape.S, test.dtype, layout, true}, layout == BNEXPORT_NCS ? 40 : 160));
    CHECK(one.plan.parts > 128);
    one.run(one.forward());
    for (int64_t c = 0; c < shape.C; ++c) {
      check_forward(test, shape, one.x, one.y, one.layer, c,
                    Reference({shape}, layout, std::vector<const Buffer*>{&one.x}, c));
    }
  }
}

// Means far from zero, where sums of squares would have nothing left; rows that leave batches which are not full.
void test_large_means() {
  for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
    for (const double mean : {1e4, -1e4, 300.0}) {
      for (const int32_t dtype : {BNEXPORT_FLOAT32, BNEXPORT_FLOAT64}) test_case({{4, 3, 900}, dtype, layout, mean});
    }
    for (const int32_t dtype : {BNEXPORT_FLOAT16, BNEXPORT_BFLOAT16}) {
      for (int i = 0; i < 5; ++i) test_case({{7, 3, 49}, dtype, layout, -1000});
    }
  }
}

// Values whose squares leave the range of float32 and one value far from all others.
void test_extremes() {
  for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
    for (const Shape& shape : {Shape{3, 4, 700}, Shape{3, 3, 700}}) {
      for (const double scale : {1e25, 1e-25, 0.0}) {
        Process one({shape, BNEXPORT_FLOAT32, layout});
        fill(one.x, 3, scale, scale);
        if (scale == 0) {  // the first value of a channel is an outlier, and a bad pivot
          fill(one.x, 3, 1, 1e-2);
          for (int64_t c = 0; c < shape.C; ++c) one.x.set(shape.at(layout, 0, c, 0), -1000);
        }
        bnexport_forward p = one.forward();
        p.eps = 0;
        one.run(p);
        for (int64_t c = 0; c < shape.C; ++c) {
          const Reference r({shape}, layout, std::vector<const Buffer*>{&one.x}, c);
          const auto invstd = static_cast<double>(1 / std::sqrt(r.variance));
          CHECK_NEAR(one.layer.saved_invstd[static_cast<size_t>(c)] / invstd, 1, 32 * 0x1p-24);
          CHECK_NEAR(one.layer.saved_mean[static_cast<size_t>(c)] * invstd, static_cast<double>(r.mean) * invstd,
                     32 * 0x1p-24);
        }
      }
    }
  }
}

// NaN stays in its channel.
void test_nan() {
  for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
    Process one({{4, 8, 900}, BNEXPORT_FLOAT16, layout});
    one.x.set(one.test.shape.at(layout, 1, 2, 5), NAN);
    one.run(one.forward());
    for (int64_t c = 0; c < one.test.shape.C; ++c) {
      CHECK(std::isnan(one.layer.saved_mean[static_cast<size_t>(c)]) == (c == 2));
      one.test.shape.each(layout, c, [&](int64_t i) { CHECK(std::isnan(one.y.get(i)) == (c == 2)); });
    }
  }
}

// Processes of a group: rows, then statistics and outputs of each; one process is empty.
void test_group() {
  for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
    const std::vector<Shape> shapes = {{3, 10, 49}, {0, 10, 49}, {1, 10, 600}};
    const int64_t C = 10, G = 3, width = 2 * C + 1;
    std::vector<double> rows(static_cast<size_t>(G * width), NAN), gradient_rows(rows);
    std::vector<Process> group;
    std::vector<const Buffer*> xs;
    for (size_t r = 0; r < shapes.size(); ++r) {
      group.emplace_back(Case{shapes[r], BNEXPORT_FLOAT32, layout, static_cast<double>(r)});
    }
    for (const Process& one : group) xs.push_back(&one.x);
    const auto row_of = [&](std::vector<double>& all, size_t r) {
      return all.data() + static_cast<int64_t>(r) * width;
    };
    for (size_t r = 0; r < group.size(); ++r) group[r].run(group[r].forward(), row_of(rows, r));
    for (Process& one : group) {
      bnexport_forward p = one.forward();
      p.group_size = G;
      p.gathered = rows.data();
      one.run(p);
      for (int64_t c = 0; c < C; ++c) {
        check_forward(one.test, one.test.shape, one.x, one.y, one.layer, c, Reference(shapes, layout, xs, c));
      }
    }
    for (size_t r = 0; r < group.size(); ++r) group[r].run(group[r].backward(), row_of(gradient_rows, r));
    for (size_t r = 0; r < group.size(); ++r) {
      Process& one = group[r];
      bnexport_backward b = one.backward();
      b.group_size = G;
      b.gathered = gradient_rows.data();
      b.local_moments = row_of(gradient_rows, r);
      one.run(b);
      for (int64_t c = 0; c < C; ++c) {
        Reference all(shapes, layout, xs, c), local(all);
        const auto invstd = static_cast<long double>(one.layer.saved_invstd[static_cast<size_t>(c)]);
        for (const Process& other : group) {
          all.add_gradient(other.test.shape, layout, other.x, other.dy, invstd, c);
        }
        local.add_gradient(shapes[r], layout, one.x, one.dy, invstd, c);
        check_gradient(one.test, shapes[r], one.x, one.dy, one.dx, one.layer, c, all, local);
      }
    }
  }
}

// Inference, its gradient (which does not read x), and absent parameters.
void test_fixed_statistics() {
  for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
    Process one({{3, 9, 49}, BNEXPORT_FLOAT16, layout});
    bnexport_forward p = one.forward();
    p.weight = p.bias = nullptr;
    p.training = 0;
    one.run(p);
    Buffer infinite(one.x);
    for (int64_t i = 0; i < infinite.count(); ++i) infinite.set(i, INFINITY);
    bnexport_backward b = one.backward();
    b.training = 0;
    b.x = infinite.data();
    b.dweight = b.dbias = nullptr;
    one.run(b);
    const Layer& layer = one.layer;
    for (int64_t c = 0; c < one.test.shape.C; ++c) {
      const double invstd = 1 / std::sqrt(2 + kEps), weight = layer.weight[static_cast<size_t>(c)];
      CHECK(layer.new_mean[static_cast<size_t>(c)] == 1 && layer.new_var[static_cast<size_t>(c)] == 2);
      CHECK(layer.saved_mean[static_cast<size_t>(c)] == 1);
      one.test.shape.each(layout, c, [&](int64_t i) {
        const double y = one.y.get(i), dx = one.dx.get(i);
        CHECK_NEAR(y, (one.x.get(i) - 1) * invstd, 0x1p-10 * std::fabs(y) + 1e-6);
        CHECK_NEAR(dx, one.dy.get(i) * invstd * weight, 0x1p-10 * std::fabs(dx) + 1e-6);
      });
    }
  }
}

void test_empty() {
  for (const Shape& shape : {Shape{0, 5, 49}, Shape{3, 5, 0}, Shape{3, 0, 7}}) {
    for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
      Process one({shape, BNEXPORT_FLOAT32, layout});
      const Layer& layer = one.layer;
      one.run(one.forward());
      for (size_t c = 0; c < static_cast<size_t>(shape.C); ++c) CHECK(layer.new_mean[c] == 1 && layer.new_var[c] == 2);
      std::vector<double> row(static_cast<size_t>(2 * shape.C + 1), NAN);
      one.run(one.forward(), row.data());
      CHECK(row[0] == static_cast<double>(shape.N * shape.S));
      for (size_t i = 1; i < row.size(); ++i) CHECK(row[i] == 0);
      one.run(one.backward());
      for (size_t c = 0; c < static_cast<size_t>(shape.C); ++c) CHECK(layer.dweight[c] == 0 && layer.dbias[c] == 0);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int seeds = count > 1 ? std::atoi(arguments[1]) : 1;
  for (int i = 0; i < seeds; ++i) {
    test_empty();
    test_fixed_statistics();
    test_group();
    test_extremes();
    test_nan();
    test_large_means();
    test_many_parts();
    test_more_parts_than_threads();
    test_shapes();
  }
  std::printf("cuda kernels on the host: ok\n");
  return 0;
}
