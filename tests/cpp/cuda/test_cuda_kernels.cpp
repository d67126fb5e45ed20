// Every kernel, from plan to launch, on the emulated device, against the naive reference: all element
// types, both layouts, shapes at the edges of rows, vectors, tiles and parts.
//
//   test_cuda_kernels [seeds]     orders of threads and blocks to run all cases in (1)
#include <cstdlib>

#include "../../../custom_ops/kernels/common/statistics_definitions.h"
#include "emulated_launcher.h"
#include "reference.h"

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

EmulatedLauncher launcher_of() {
  EmulatedLauncher launcher;
  launcher.seed = seed += 1000;
  return launcher;
}

void fill(Buffer& buffer, uint32_t number, double mean, double std) {
  std::mt19937 random(number);
  std::normal_distribution<double> normal(mean, std);
  for (int64_t i = 0; i < buffer.count(); ++i) buffer.set(i, normal(random));
}

template <class Params>
Params common(const Case& test) {
  Params p{};
  p.struct_size = sizeof(p);
  p.dtype = test.dtype;
  p.stats_dtype = BNEXPORT_FLOAT64;
  p.layout = test.layout;
  p.N = test.shape.N;
  p.C = test.shape.C;
  p.S = test.shape.S;
  p.training = 1;
  p.group_size = 1;
  p.threads = 1;
  return p;
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

void set_layer(bnexport_forward& p, Layer& layer) {
  p.weight = layer.weight.data();
  p.bias = layer.bias.data();
  p.running_mean = layer.mean.data();
  p.running_var = layer.var.data();
  p.running_mean_out = layer.new_mean.data();
  p.running_var_out = layer.new_var.data();
  p.saved_mean = layer.saved_mean.data();
  p.saved_invstd = layer.saved_invstd.data();
  p.momentum = kMomentum;
  p.eps = kEps;
}

void set_layer(bnexport_backward& p, Layer& layer) {
  p.weight = layer.weight.data();
  p.saved_mean = layer.saved_mean.data();
  p.saved_invstd = layer.saved_invstd.data();
  p.dweight = layer.dweight.data();
  p.dbias = layer.dbias.data();
}

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
  const Shape& shape = test.shape;
  const LaunchPlan plan = plan_of(test);
  EmulatedLauncher launcher = launcher_of();
  Buffer x(test.dtype, shape.elements(), test.offset * bytes_of(test.dtype)), dy(x), y(x), dx(x);
  fill(x, seed, test.mean, 1);
  fill(dy, seed + 1, 0.25, 1);
  Buffer &result = test.in_place ? x : y, &gradient = test.in_place ? dy : dx;
  const Buffer x_before(x), dy_before(dy);
  Layer layer(shape.C);
  auto p = common<bnexport_forward>(test);
  set_layer(p, layer);
  p.x = x.data();
  p.y = result.data();
  run_forward(p, plan, workspace_of(plan), launcher);
  CHECK(launcher.launches == 3);
  const Buffer output(result);
  if (test.in_place) x = x_before;
  CHECK(x.same_bits(x_before) && output.guards_hold());

  auto b = common<bnexport_backward>(test);
  set_layer(b, layer);
  b.dy = dy.data();
  b.x = x.data();
  b.dx = gradient.data();
  run_backward(b, plan, workspace_of(plan), launcher);
  CHECK(launcher.launches == 6);
  CHECK(x.same_bits(x_before) && gradient.guards_hold() && (test.in_place || dy.same_bits(dy_before)));
  for (int64_t c = 0; c < shape.C; ++c) {
    Reference r({shape}, test.layout, std::vector<Buffer>{x}, c);
    check_forward(test, shape, x, output, layer, c, r);
    r.add_gradient(shape, test.layout, x, dy_before,
                   static_cast<long double>(layer.saved_invstd[static_cast<size_t>(c)]), c);
    check_gradient(test, shape, x, dy_before, gradient, layer, c, r, r);
  }

  // Another order of threads and blocks, the same bits.
  const Buffer first(gradient);
  Buffer again(y);
  again.poison();
  gradient.poison();
  dy = dy_before;
  p.y = again.data();
  run_forward(p, plan, workspace_of(plan), launcher);
  run_backward(b, plan, workspace_of(plan), launcher);
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

// Channels of many parts, a different number for each kind of vector; the last ones are shorter. With one channel, more
// parts than a block has threads.
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

void test_more_parts_than_threads() {
  for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
    // As planned for 40 multiprocessors.
    const Case test{layout == BNEXPORT_NCS ? Shape{1, 1, 300000} : Shape{300000, 2, 1}, BNEXPORT_FLOAT64, layout};
    const LaunchPlan plan = launch_plan({test.shape.N, test.shape.C, test.shape.S, test.dtype, layout, true},
                                        layout == BNEXPORT_NCS ? 40 : 160);
    CHECK(plan.parts > 128);
    EmulatedLauncher launcher = launcher_of();
    Buffer x(test.dtype, test.shape.elements(), 0), y(x);
    fill(x, 1, 3, 2);
    Layer layer(test.shape.C);
    auto p = common<bnexport_forward>(test);
    set_layer(p, layer);
    p.x = x.data();
    p.y = y.data();
    run_forward(p, plan, workspace_of(plan), launcher);
    for (int64_t c = 0; c < test.shape.C; ++c) {
      check_forward(test, test.shape, x, y, layer, c, Reference({test.shape}, layout, std::vector<Buffer>{x}, c));
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
        const Case test{shape, BNEXPORT_FLOAT32, layout};
        const LaunchPlan plan = plan_of(test);
        Buffer x(test.dtype, shape.elements(), 0), y(x);
        fill(x, 3, scale, scale);
        if (scale == 0) {  // the first value of a channel is an outlier, and a bad pivot
          fill(x, 3, 1, 1e-2);
          for (int64_t c = 0; c < shape.C; ++c) x.set(shape.at(layout, 0, c, 0), -1000);
        }
        Layer layer(shape.C);
        auto p = common<bnexport_forward>(test);
        set_layer(p, layer);
        p.eps = 0;
        p.x = x.data();
        p.y = y.data();
        EmulatedLauncher launcher = launcher_of();
        run_forward(p, plan, workspace_of(plan), launcher);
        for (int64_t c = 0; c < shape.C; ++c) {
          const Reference r({shape}, layout, std::vector<Buffer>{x}, c);
          const auto invstd = static_cast<double>(1 / std::sqrt(r.variance));
          CHECK_NEAR(layer.saved_invstd[static_cast<size_t>(c)] / invstd, 1, 32 * 0x1p-24);
          CHECK_NEAR(layer.saved_mean[static_cast<size_t>(c)] * invstd, static_cast<double>(r.mean) * invstd,
                     32 * 0x1p-24);
        }
      }
    }
  }
}

// NaN stays in its channel.
void test_nan() {
  for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
    const Case test{{4, 8, 900}, BNEXPORT_FLOAT16, layout};
    const LaunchPlan plan = plan_of(test);
    Buffer x(test.dtype, test.shape.elements(), 0), y(x);
    fill(x, 3, 1, 1);
    x.set(test.shape.at(layout, 1, 2, 5), NAN);
    Layer layer(test.shape.C);
    auto p = common<bnexport_forward>(test);
    set_layer(p, layer);
    p.x = x.data();
    p.y = y.data();
    EmulatedLauncher launcher = launcher_of();
    run_forward(p, plan, workspace_of(plan), launcher);
    for (int64_t c = 0; c < test.shape.C; ++c) {
      CHECK(std::isnan(layer.saved_mean[static_cast<size_t>(c)]) == (c == 2));
      test.shape.each(layout, c, [&](int64_t i) { CHECK(std::isnan(y.get(i)) == (c == 2)); });
    }
  }
}

// Processes of a group: rows, then statistics and outputs of each; one process is empty.
void test_group() {
  for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
    const std::vector<Shape> shapes = {{3, 10, 49}, {0, 10, 49}, {1, 10, 600}};
    const int64_t C = 10, G = 3, width = 2 * C + 1;
    std::vector<Buffer> xs, dys;
    std::vector<double> rows(static_cast<size_t>(G * width), NAN), gradient_rows(rows);
    EmulatedLauncher launcher = launcher_of();
    const auto test_of = [&](size_t r) { return Case{shapes[r], BNEXPORT_FLOAT32, layout}; };
    for (size_t r = 0; r < shapes.size(); ++r) {
      xs.emplace_back(BNEXPORT_FLOAT32, shapes[r].elements(), 0);
      dys.emplace_back(BNEXPORT_FLOAT32, shapes[r].elements(), 0);
      fill(xs[r], static_cast<uint32_t>(r), static_cast<double>(r), 1);
      fill(dys[r], static_cast<uint32_t>(r + 9), 0, 1);
      auto p = common<bnexport_forward>(test_of(r));
      p.x = xs[r].data();
      const LaunchPlan plan = plan_of(test_of(r));
      run_forward(p, plan, workspace_of(plan), launcher, rows.data() + static_cast<int64_t>(r) * width);
    }
    std::vector<Layer> layers(shapes.size(), Layer(C));
    for (size_t r = 0; r < shapes.size(); ++r) {
      Buffer y(BNEXPORT_FLOAT32, shapes[r].elements(), 0);
      auto p = common<bnexport_forward>(test_of(r));
      set_layer(p, layers[r]);
      p.x = xs[r].data();
      p.y = y.data();
      p.group_size = G;
      p.gathered = rows.data();
      const LaunchPlan plan = plan_of(test_of(r));
      run_forward(p, plan, workspace_of(plan), launcher);
      for (int64_t c = 0; c < C; ++c) {
        check_forward(test_of(r), shapes[r], xs[r], y, layers[r], c, Reference(shapes, layout, xs, c));
      }

      auto b = common<bnexport_backward>(test_of(r));
      set_layer(b, layers[r]);
      b.dy = dys[r].data();
      b.x = xs[r].data();
      const LaunchPlan sums = plan_of(test_of(r));
      run_backward(b, sums, workspace_of(sums), launcher, gradient_rows.data() + static_cast<int64_t>(r) * width);
    }
    for (size_t r = 0; r < shapes.size(); ++r) {
      Buffer dx(BNEXPORT_FLOAT32, shapes[r].elements(), 0);
      auto b = common<bnexport_backward>(test_of(r));
      set_layer(b, layers[r]);
      b.dy = dys[r].data();
      b.x = xs[r].data();
      b.dx = dx.data();
      b.group_size = G;
      b.gathered = gradient_rows.data();
      b.local_moments = gradient_rows.data() + static_cast<int64_t>(r) * width;
      const LaunchPlan plan = plan_of(test_of(r));
      run_backward(b, plan, workspace_of(plan), launcher);
      for (int64_t c = 0; c < C; ++c) {
        Reference group(shapes, layout, xs, c), local(group);
        const auto invstd = static_cast<long double>(layers[r].saved_invstd[static_cast<size_t>(c)]);
        for (size_t other = 0; other < shapes.size(); ++other) {
          group.add_gradient(shapes[other], layout, xs[other], dys[other], invstd, c);
        }
        local.add_gradient(shapes[r], layout, xs[r], dys[r], invstd, c);
        check_gradient(test_of(r), shapes[r], xs[r], dys[r], dx, layers[r], c, group, local);
      }
    }
  }
}

// Inference, its gradient (which does not read x), and absent parameters.
void test_fixed_statistics() {
  for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
    Case test{{3, 9, 49}, BNEXPORT_FLOAT16, layout};
    Buffer x(test.dtype, test.shape.elements(), 0), y(x), dy(x), dx(x);
    fill(x, 1, 1, 1);
    fill(dy, 2, 0, 1);
    Layer layer(test.shape.C);
    auto p = common<bnexport_forward>(test);
    set_layer(p, layer);
    p.weight = p.bias = nullptr;
    p.training = 0;
    p.x = x.data();
    p.y = y.data();
    EmulatedLauncher launcher = launcher_of();
    const LaunchPlan plan = plan_of(test);
    run_forward(p, plan, workspace_of(plan), launcher);
    auto b = common<bnexport_backward>(test);
    set_layer(b, layer);
    Buffer infinite(x);
    for (int64_t i = 0; i < infinite.count(); ++i) infinite.set(i, INFINITY);
    b.training = 0;
    b.dy = dy.data();
    b.x = infinite.data();
    b.dx = dx.data();
    b.dweight = b.dbias = nullptr;
    run_backward(b, plan, workspace_of(plan), launcher);
    for (int64_t c = 0; c < test.shape.C; ++c) {
      const double invstd = 1 / std::sqrt(2 + kEps), weight = layer.weight[static_cast<size_t>(c)];
      CHECK(layer.new_mean[static_cast<size_t>(c)] == 1 && layer.new_var[static_cast<size_t>(c)] == 2);
      CHECK(layer.saved_mean[static_cast<size_t>(c)] == 1);
      test.shape.each(layout, c, [&](int64_t i) {
        CHECK_NEAR(y.get(i), (x.get(i) - 1) * invstd, 0x1p-10 * std::fabs(y.get(i)) + 1e-6);
        CHECK_NEAR(dx.get(i), dy.get(i) * invstd * weight, 0x1p-10 * std::fabs(dx.get(i)) + 1e-6);
      });
    }
  }
}

void test_empty() {
  for (const Shape& shape : {Shape{0, 5, 49}, Shape{3, 5, 0}, Shape{3, 0, 7}}) {
    for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
      const Case test{shape, BNEXPORT_FLOAT32, layout};
      Layer layer(shape.C);
      auto p = common<bnexport_forward>(test);
      set_layer(p, layer);
      EmulatedLauncher launcher = launcher_of();
      const LaunchPlan plan = plan_of(test);
      run_forward(p, plan, workspace_of(plan), launcher);
      for (size_t c = 0; c < static_cast<size_t>(shape.C); ++c) CHECK(layer.new_mean[c] == 1 && layer.new_var[c] == 2);
      std::vector<double> row(static_cast<size_t>(2 * shape.C + 1), NAN);
      run_forward(p, plan, workspace_of(plan), launcher, row.data());
      CHECK(row[0] == static_cast<double>(shape.N * shape.S));
      for (size_t i = 1; i < row.size(); ++i) CHECK(row[i] == 0);
      auto b = common<bnexport_backward>(test);
      set_layer(b, layer);
      run_backward(b, plan, workspace_of(plan), launcher);
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
