// Bytes that the kernels move for each batch norm of ResNet-50, counted in 32-byte sectors on the emulated device:
//
//   layer_traffic [batch]     a table in Markdown for an H100; `make cuda-traffic`
//
// Each layer runs with the plan of the whole layer over as few channels as its blocks take at a time: a channel's
// traffic does not depend on how many there are. "two reads" is the split plan.
#include <cinttypes>
#include <cstdlib>

#include "emulated_launcher.h"
#include "reference.h"

namespace {

using namespace bnexport::cuda;

constexpr int64_t kKilo = 1 << 10, kMega = 1 << 20;
constexpr DeviceProperties kH100 = {132, 227 * kKilo, 228 * kKilo, kKilo, 50 * kMega, 16};

struct Layers {
  int64_t channels, side, count;
};
// Of torchvision's ResNet-50 at 224 x 224.
constexpr Layers kLayers[] = {{64, 112, 1}, {64, 56, 6},   {128, 56, 1}, {256, 56, 4},  {128, 28, 7}, {256, 28, 1},
                              {512, 28, 5}, {256, 14, 11}, {512, 14, 1}, {1024, 14, 7}, {512, 7, 5},  {2048, 7, 4}};

template <class Params>
Params params_of(const Problem& p, Buffer& x, Buffer& y, std::vector<double>& statistics) {
  Params params{};
  params.struct_size = sizeof(params);
  params.dtype = p.dtype;
  params.stats_dtype = BNEXPORT_FLOAT64;
  params.layout = p.layout;
  params.N = p.N;
  params.C = p.C;
  params.S = p.S;
  params.training = 1;
  params.group_size = 1;
  params.threads = 1;
  params.x = x.data();
  params.saved_mean = statistics.data();
  params.saved_invstd = statistics.data() + p.C;
  if constexpr (std::is_same_v<Params, bnexport_forward>) {
    params.y = y.data();
    params.eps = 1e-5;
  } else {
    params.dy = x.data();
    params.dx = y.data();
  }
  return params;
}

// Bytes moved for each byte of the layer's tensor with the plan of `whole`.
double moved(const Problem& whole, const LaunchPlan& plan) {
  Problem part = whole;
  part.C = plan.strategy != Strategy::kPersistent ? (plan.columns ? 2 * plan.width : 2)
           : plan.columns                         ? plan.teams * plan.lanes * plan.width
                                                  : plan.teams;
  const LaunchPlan run =
      launch_plan(part, kH100, {plan.strategy, plan.strategy == Strategy::kCluster ? plan.cluster : 0});
  CHECK(run.strategy == plan.strategy && run.cluster == plan.cluster && run.teams == plan.teams);
  CHECK(!plan.columns || plan.strategy != Strategy::kPersistent || run.shared == plan.shared);
  Buffer x(part.dtype, part.N * part.C * part.S, 0), y(x), dy(x);
  for (int64_t i = 0; i < x.count(); ++i) x.set(i, static_cast<double>(i * 7919 % 1009) / 1009);
  for (int64_t i = 0; i < x.count(); ++i) dy.set(i, static_cast<double>(i * 104729 % 1013) / 1013);
  std::vector<double> statistics(static_cast<size_t>(2 * part.C), 0.5);
  std::vector<unsigned char> workspace(static_cast<size_t>(run.workspace));
  EmulatedLauncher launcher;
  emulator::traffic = 0;
  if (whole.tensors == 1) {
    run_forward(params_of<bnexport_forward>(part, x, y, statistics), run, workspace.data(), launcher);
  } else {
    auto params = params_of<bnexport_backward>(part, x, y, statistics);
    params.dy = dy.data();
    run_backward(params, run, workspace.data(), launcher);
  }
  const auto bytes = static_cast<double>(emulator::traffic);
  emulator::traffic = -1;
  return bytes / static_cast<double>(2 * x.count());
}

std::string name_of(const LaunchPlan& plan) {
  switch (plan.strategy) {
    case Strategy::kCluster: return "cluster " + std::to_string(plan.cluster);
    case Strategy::kPersistent: return std::to_string(plan.teams) + (plan.teams == 1 ? " team" : " teams");
    default: return "split";
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int64_t batch = count > 1 ? std::atoll(arguments[1]) : 256;
  double before = 0, after = 0;
  std::printf(
      "| channels | size | layers | pass | two reads, MB | NHWC: plan | MB | NCHW: plan | MB |\n"
      "|---:|---:|---:|---|---:|---|---:|---|---:|\n");
  for (const Layers& layer : kLayers) {
    for (const int64_t tensors : {1, 2}) {
      const int64_t S = layer.side * layer.side;
      Problem p{batch, layer.channels, S, BNEXPORT_FLOAT16, BNEXPORT_NSC, tensors, true, true};
      const double mega = static_cast<double>(2 * batch * layer.channels * S) / 1e6;
      const LaunchPlan plan = launch_plan(p, kH100);
      const double split = mega * moved(p, launch_plan(p, kH100, {Strategy::kSplit, 0}));
      const double columns = plan.strategy == Strategy::kSplit ? split : mega * moved(p, plan);
      p.layout = BNEXPORT_NCS;
      const LaunchPlan rows_plan = launch_plan(p, kH100);
      const double rows = mega * moved(p, rows_plan);
      std::printf("| %" PRId64 " | %" PRId64 " | %" PRId64 " | %s | %.0f | %s | %.0f | %s | %.0f |\n", layer.channels,
                  layer.side, layer.count, tensors == 1 ? "forward" : "backward", split, name_of(plan).c_str(), columns,
                  name_of(rows_plan).c_str(), rows);
      std::fflush(stdout);
      before += split * static_cast<double>(layer.count);
      after += columns * static_cast<double>(layer.count);
    }
  }
  std::printf("\nAll 53 layers of a step in NHWC: %.1f GB by two reads, %.1f GB by these plans.\n", before / 1e3,
              after / 1e3);
  return 0;
}
