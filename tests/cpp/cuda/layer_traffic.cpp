// Bytes that the kernels move for each batch norm of ResNet-50, counted in 32-byte sectors on the emulated device:
//
//   layer_traffic [batch]     a table in Markdown for an H100; `make cuda-traffic`
//
// Each layer runs with few of its channels: a channel's traffic does not depend on how many there are. S is the size of
// the layer's tensor: a forward moves 3 S, a backward 5 S. Parts are not counted: test_launch_plan holds their share.
#include <cinttypes>
#include <cstdlib>

#include "../tensors.h"
#include "emulated_launcher.h"

namespace {

using namespace bnexport::cuda;

constexpr int64_t kMultiprocessors = 132;

struct Layers {
  int64_t channels, side, count;
};
// Of torchvision's ResNet-50 at 224 x 224.
constexpr Layers kLayers[] = {{64, 112, 1}, {64, 56, 6},   {128, 56, 1}, {256, 56, 4},  {128, 28, 7}, {256, 28, 1},
                              {512, 28, 5}, {256, 14, 11}, {512, 14, 1}, {1024, 14, 7}, {512, 7, 5},  {2048, 7, 4}};

// Bytes moved for each byte of a layer's tensor, all launches together, with the plan of the whole layer over as few
// channels as a tile has.
double moved(const Problem& whole, bool backward) {
  const LaunchPlan all = launch_plan(whole, kMultiprocessors);
  Problem part = whole;
  part.C = all.columns ? all.lanes * all.width : 2;
  // As many parts as the whole layer's.
  LaunchPlan plan = launch_plan(part, all.columns ? std::max<int64_t>(all.parts / 2, 1) : kMultiprocessors);
  CHECK(plan.columns == all.columns && plan.width == all.width && plan.lanes == all.lanes);
  const Shape shape{part.N, part.C, part.S};
  Buffer x(part.dtype, shape.elements()), y(x), dy(x);
  for (int64_t i = 0; i < x.count(); ++i) x.set(i, static_cast<double>(i * 7919 % 1009) / 1009);
  for (int64_t i = 0; i < x.count(); ++i) dy.set(i, static_cast<double>(i * 104729 % 1013) / 1013);
  std::vector<double> statistics(static_cast<size_t>(2 * part.C), 0.5);
  std::vector<double> workspace(static_cast<size_t>(plan.workspace) / sizeof(double));
  EmulatedLauncher launcher;
  emulator::traffic = 0;
  if (backward) {
    auto params = params_of<bnexport_backward>(shape, part.dtype, part.layout, x, y, statistics, 1);
    params.dy = dy.data();
    run_backward(params, plan, workspace.data(), launcher);
  } else {
    run_forward(params_of<bnexport_forward>(shape, part.dtype, part.layout, x, y, statistics, 1), plan,
                workspace.data(), launcher);
  }
  CHECK(launcher.launches == 3);
  const auto bytes = static_cast<double>(emulator::traffic);
  emulator::traffic = -1;
  return bytes / static_cast<double>(bytes_of(part.dtype) * x.count());
}

}  // namespace

int main(int count, char** arguments) {
  const int64_t batch = count > 1 ? std::atoll(arguments[1]) : 256;
  double total = 0;
  std::printf(
      "| channels | size | layers | pass | S, MB | NHWC: MB | of S | NCHW: MB | of S |\n"
      "|---:|---:|---:|---|---:|---:|---:|---:|---:|\n");
  for (const Layers& layer : kLayers) {
    for (const bool backward : {false, true}) {
      const int64_t S = layer.side * layer.side;
      const double mega = static_cast<double>(2 * batch * layer.channels * S) / 1e6, least = backward ? 5 : 3;
      const double columns = moved({batch, layer.channels, S, BNEXPORT_FLOAT16, BNEXPORT_NSC}, backward);
      const double rows = moved({batch, layer.channels, S, BNEXPORT_FLOAT16, BNEXPORT_NCS}, backward);
      std::printf("| %" PRId64 " | %" PRId64 " | %" PRId64 " | %s | %.0f | %.0f | %.3f | %.0f | %.3f |\n",
                  layer.channels, layer.side, layer.count, backward ? "backward" : "forward", mega, mega * columns,
                  columns, mega * rows, rows);
      std::fflush(stdout);
      CHECK(columns >= least && columns < 1.03 * least && rows >= least && rows < 1.03 * least);
      total += mega * columns * static_cast<double>(layer.count);
    }
  }
  std::printf("\nAll 53 layers of a step in NHWC: %.1f GB, three launches each.\n", total / 1e3);
  return 0;
}
