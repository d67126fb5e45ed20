// The constants were measured on an H200 (docs/design/gpu_kernels.md): a block of 256 threads has 16 KB of loads in
// flight, and a multiprocessor takes four.
#include "launch_plan.h"

#include <algorithm>
#include <limits>

#include "../../include/bnexport.h"
#include "../common/math.h"
#include "../common/statistics.h"
#include "rows.h"

namespace bnexport::cuda {

namespace {

constexpr int64_t kVector = 16;           // bytes
constexpr int64_t kColumnWidth = 4;       // elements of a vector, each of a channel with registers of its own
constexpr int64_t kRound = 4 * kThreads;  // vectors that a block has in flight
constexpr int64_t kShortest = 8;          // rows of a thread of columns
constexpr int64_t kOverhead = 1;          // rounds that a block takes without data
constexpr int64_t kMostWaves = 4;
constexpr int64_t kLongestPart = int64_t{1} << 23;  // values: half of what float counts exactly
constexpr int64_t kTileBytes = 128;                 // of a row: a line of the cache
constexpr int64_t kCoefficientBytes = sizeof(BackwardCoefficients);
static_assert(sizeof(ForwardCoefficients) <= kCoefficientBytes, "the workspace of a channel");
static_assert(sizeof(GradientSums) <= sizeof(Moments), "the workspace of a part");

int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

int64_t size_of(int32_t dtype) { return dtype == BNEXPORT_FLOAT64 ? 8 : dtype == BNEXPORT_FLOAT32 ? 4 : 2; }

// Blocks run in waves, each as long as a part and what a block takes without data: parts as long as the best number of
// waves allows, in whole rounds of a block.
void plan_rows(const Problem& problem, int64_t multiprocessors, LaunchPlan& plan) {
  const Rows rows(problem.N, problem.C, problem.S, plan.width);
  const int64_t units = std::max<int64_t>(rows.slab_units(), 1), C = std::max<int64_t>(problem.C, 1);
  const int64_t places = kBlocks * multiprocessors,
                longest = std::max(kLongestPart / (plan.width * kRound), int64_t{1});
  plan.whole = rows.whole;
  int64_t rounds = longest, best = std::numeric_limits<int64_t>::max();
  for (int64_t waves = 1; waves <= kMostWaves; ++waves) {
    const int64_t parts = std::max(waves * places / C, int64_t{1});
    const int64_t some = std::min(ceil_div(ceil_div(units, parts), kRound), longest);
    const int64_t blocks = C * ceil_div(units, some * kRound), time = ceil_div(blocks, places) * (some + kOverhead);
    if (time < best) {
      best = time;
      rounds = some;
    }
  }
  plan.part_length = rounds * kRound;
  plan.parts = ceil_div(units, plan.part_length);
  plan.blocks = problem.C * plan.parts;
}

// Parts that all run at the same time: several waves of short ones would write an eighth of the tensor once more.
void plan_columns(const Problem& problem, int64_t multiprocessors, LaunchPlan& plan) {
  const int64_t R = std::max<int64_t>(problem.N * problem.S, 1);
  const int64_t vectors = ceil_div(std::max<int64_t>(problem.C, 1), plan.width);
  const int64_t widest = std::min<int64_t>(kTileBytes / (plan.width * size_of(problem.dtype)), 32);
  while (plan.lanes < widest && plan.lanes < vectors) plan.lanes *= 2;
  plan.tiles = ceil_div(vectors, plan.lanes);
  const int64_t high = kThreads / plan.lanes;
  int64_t parts = std::min(kBlocks * multiprocessors / plan.tiles, R / (kShortest * high));
  parts = std::max({parts, int64_t{1}, ceil_div(R, kLongestPart)});
  plan.part_length = round_up(ceil_div(R, parts), high);
  plan.parts = ceil_div(R, plan.part_length);
  plan.blocks = plan.tiles * plan.parts;
}

// As many channels side by side as let a thread read its parts at the same time.
int64_t side_by_side(int64_t parts) {
  int64_t channels = kThreads / 2;
  while (channels > 4 && parts * channels > 4 * kThreads) channels /= 2;
  return channels;
}

}  // namespace

LaunchPlan launch_plan(const Problem& problem, int64_t multiprocessors) {
  LaunchPlan plan;
  plan.columns = problem.layout == BNEXPORT_NSC || problem.S == 1;
  const int64_t size = size_of(problem.dtype);
  plan.width = problem.aligned && problem.dtype != BNEXPORT_FLOAT64 ? kVector / size : 1;
  if (plan.columns) plan.width = problem.C % kColumnWidth == 0 ? std::min(plan.width, kColumnWidth) : 1;
  if (plan.columns) {
    plan_columns(problem, multiprocessors, plan);
  } else {
    plan_rows(problem, multiprocessors, plan);
  }
  if (problem.N == 0 || problem.C == 0 || problem.S == 0) plan.blocks = plan.parts = 0;
  plan.side_by_side = side_by_side(plan.parts);
  plan.coefficients_at = round_up(problem.C * plan.parts * static_cast<int64_t>(sizeof(Moments)), 256);
  plan.workspace = plan.coefficients_at + round_up(problem.C * kCoefficientBytes, 256);
  return plan;
}

}  // namespace bnexport::cuda
