// Predictions behind the constants, to be checked where there is a GPU (docs/gpu.md): about 26 KB of loads
// in flight keep a multiprocessor of an H200 busy; a block of 256 threads with four 16-byte loads each has 16 KB.
#include "launch_plan.h"

#include <algorithm>
#include <stdexcept>

#include "../../include/bnexport.h"
#include "../common/math.h"
#include "../common/statistics.h"
#include "rows.h"

namespace bnexport::cuda {

namespace {

constexpr int64_t kVector = 16;  // bytes
constexpr int64_t kBlockThreads = 256;
constexpr int64_t kLongestPart = int64_t{1} << 23;  // values: half of what float counts exactly
constexpr int64_t kRowBlocks = 4 * 4;               // a multiprocessor: four waves, short ones even out the end
constexpr int64_t kColumnBlocks = 2;                // a multiprocessor: all at the same time
constexpr int64_t kShortestPart = 1024;             // vectors: one round of 256 threads, 4 loads each
constexpr int64_t kTileBytes = 128;                 // of a row: a line of the cache
constexpr int64_t kPairBytes = 16;
constexpr int64_t kCoefficientBytes = sizeof(BackwardCoefficients);
static_assert(sizeof(ForwardCoefficients) <= kCoefficientBytes, "the workspace of a channel");

int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

int64_t size_of(int32_t dtype) { return dtype == BNEXPORT_FLOAT64 ? 8 : dtype == BNEXPORT_FLOAT32 ? 4 : 2; }

void plan_rows(const Problem& problem, int64_t multiprocessors, LaunchPlan& plan) {
  const Rows rows(problem.N, problem.C, problem.S, plan.width);
  const int64_t units = std::max<int64_t>(rows.slab_units(), 1), C = std::max<int64_t>(problem.C, 1);
  plan.whole = rows.whole;
  int64_t parts = std::min(ceil_div(kRowBlocks * multiprocessors, C), units / kShortestPart);
  parts = std::max({parts, int64_t{1}, ceil_div(units * plan.width, kLongestPart)});
  // Whole rounds of the block, so that all parts but the last are alike.
  plan.part_length = round_up(ceil_div(units, parts), kBlockThreads);
  plan.parts = ceil_div(units, plan.part_length);
  plan.blocks = problem.C * plan.parts;
}

// Narrow tiles: the last block of one adds up the parts of all its channels. Parts that all run at the same time: four
// waves of short ones would write an eighth of the tensor once more.
void plan_columns(const Problem& problem, int64_t multiprocessors, LaunchPlan& plan) {
  const int64_t R = std::max<int64_t>(problem.N * problem.S, 1);
  const int64_t vectors = ceil_div(std::max<int64_t>(problem.C, 1), plan.width);
  const int64_t widest = std::min<int64_t>(kTileBytes / (plan.width * size_of(problem.dtype)), 32);
  while (plan.lanes < widest && plan.lanes < vectors) plan.lanes *= 2;
  plan.tiles = ceil_div(vectors, plan.lanes);
  const int64_t high = kBlockThreads / plan.lanes;
  int64_t parts = std::min(kColumnBlocks * multiprocessors / plan.tiles, R / (8 * high));
  parts = std::max({parts, int64_t{1}, ceil_div(R, kLongestPart)});
  plan.part_length = round_up(ceil_div(R, parts), high);
  plan.parts = ceil_div(R, plan.part_length);
  plan.blocks = plan.tiles * plan.parts;
}

}  // namespace

LaunchPlan launch_plan(const Problem& problem, int64_t multiprocessors) {
  LaunchPlan plan;
  plan.columns = problem.layout == BNEXPORT_NSC || problem.S == 1;
  const int64_t size = size_of(problem.dtype);
  plan.width = problem.aligned && problem.dtype != BNEXPORT_FLOAT64 ? kVector / size : 1;
  if (plan.columns && problem.C % plan.width != 0) plan.width = 1;
  if (plan.columns) {
    plan_columns(problem, multiprocessors, plan);
  } else {
    plan_rows(problem, multiprocessors, plan);
  }
  if (problem.N == 0 || problem.C == 0 || problem.S == 0) plan.blocks = 0;
  if (plan.parts > 1 && (plan.columns ? plan.tiles : problem.C) > kMostTickets) {
    throw std::length_error("more than 16384 channels of more than 2^23 values");
  }
  plan.partials_at = kTicketBytes;
  plan.coefficients_at = plan.partials_at + round_up(problem.C * plan.parts * kPairBytes, 256);
  plan.workspace = plan.coefficients_at + round_up(problem.C * kCoefficientBytes, 256);
  return plan;
}

}  // namespace bnexport::cuda
