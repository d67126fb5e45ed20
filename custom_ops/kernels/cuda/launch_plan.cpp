// Predictions behind the constants, to be checked where there is a GPU (docs/gpu.md): about 26 KB of loads
// in flight keep a multiprocessor of an H200 busy; a block of 256 threads with four 16-byte loads each has 16 KB.
#include "launch_plan.h"

#include "../../include/bnexport.h"
#include "../common/math.h"
#include "limits.h"
#include "rows.h"

namespace bnexport::cuda {

namespace {

constexpr int64_t kVector = 16;  // bytes
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
constexpr int64_t kLongestPart = int64_t{1} << 24;  // values: what float counts exactly
constexpr int64_t kWaves = 4;                       // of split blocks: short ones even out the end
constexpr int64_t kBlocksPerMultiprocessor = 4;     // of split kernels for rows, by their launch bounds
constexpr int64_t kColumnBlocks = 2;                // on a multiprocessor, by the launch bounds of those for columns
constexpr int64_t kShortestPart = 1024;             // vectors: one round of 256 threads, 4 loads each
constexpr int64_t kSmallPart = 16384;               // bytes: a block's work that is not worth sharing
constexpr int64_t kSmallTensor = int64_t{4} << 20;  // bytes: launches cost more than idle multiprocessors

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
int64_t power_of_two_from(int64_t a) {
  int64_t power = 1;
  while (power < a) power *= 2;
  return power;
}

class Planner {
 public:
  Planner(const Problem& problem, const DeviceProperties& device, const Wish& wish)
      : problem_(problem),
        device_(device),
        wish_(wish),
        size_(problem.dtype == BNEXPORT_FLOAT64   ? 8
              : problem.dtype == BNEXPORT_FLOAT32 ? 4
                                                  : 2),
        bytes_(problem.N * problem.C * problem.S * size_) {
    plan_.columns = problem.layout == BNEXPORT_NSC || problem.S == 1;
    const int64_t width = problem.aligned && problem.dtype != BNEXPORT_FLOAT64 ? kVector / size_ : 1;
    plan_.width = plan_.columns && problem.C % width != 0 ? 1 : width;
    plan_.stream = (problem.tensors + 1) * bytes_ > device.l2_bytes / 2;
    if (plan_.columns) return;
    const Rows rows(problem.N, problem.C, problem.S, plan_.width);
    plan_.whole = rows.whole;
    units_ = rows.slab_units();
  }

  LaunchPlan run() {
    const bool empty = bytes_ == 0;
    const auto wanted = [&](Strategy strategy) {
      return wish_.strategy == strategy || wish_.strategy == Strategy::kAutomatic;
    };
    const bool fusible = !empty && problem_.one_launch && !plan_.columns && plan_.width > 1;
    if (fusible && wanted(Strategy::kCluster) && cluster()) return finish(Strategy::kCluster);
    if (!empty && problem_.one_launch && plan_.columns && plan_.width > 1 && wanted(Strategy::kPersistent) &&
        team_columns()) {
      return finish(Strategy::kPersistent);
    }
    if (fusible && wanted(Strategy::kPersistent) && persistent()) return finish(Strategy::kPersistent);
    if (!wanted(Strategy::kSplit)) return plan_;
    if (plan_.columns) {
      columns();
    } else {
      rows();
    }
    return finish(Strategy::kSplit);
  }

 private:
  bool forced() const { return wish_.strategy != Strategy::kAutomatic; }

  // The smallest cluster whose blocks fit twice on a multiprocessor, so that one block loads while the
  // other reduces or stores; larger ones where channels are too few to fill the device.
  bool cluster() {
    const int64_t most = device_.shared_per_block - kScratchBytes;
    const int64_t half = device_.shared_per_multiprocessor / 2 - device_.shared_reserved - kScratchBytes;
    const int64_t twice = smaller(most, half);
    const int64_t slab = units_ * kVector * problem_.tensors;
    const int64_t portable = smaller(device_.largest_cluster, 8);
    const auto part_bytes = [&](int64_t blocks) { return ceil_div(units_, blocks) * kVector * problem_.tensors; };
    int64_t blocks = wish_.cluster;
    if (blocks == 0) {
      blocks = 1;
      while (blocks < portable && part_bytes(blocks) > twice) blocks *= 2;
      if (part_bytes(blocks) > twice && part_bytes(device_.largest_cluster) <= twice) blocks = device_.largest_cluster;
      const auto too_few = [&] { return problem_.C * blocks < device_.multiprocessors; };
      while (blocks < portable && too_few() && part_bytes(blocks) > kSmallPart) blocks *= 2;
      if (part_bytes(blocks) > most) blocks = device_.largest_cluster;
    }
    if (blocks > device_.largest_cluster || (blocks & (blocks - 1)) != 0 || part_bytes(blocks) > most) return false;
    const bool idle = problem_.C * blocks < device_.multiprocessors / 2;
    if (!forced() && idle && slab * problem_.C > kSmallTensor) return false;
    if (problem_.C > kMostBlocks / blocks) return false;
    const int64_t units = ceil_div(units_, blocks);
    // Enough threads for four loads each, and for 16 of a larger part; then as few as do it in as many rounds.
    const int64_t enough =
        larger(smaller(power_of_two_from(ceil_div(units, 4)), 256), power_of_two_from(ceil_div(units, 16)));
    const int64_t bound = problem_.tensors == 1 ? kForwardClusterThreads : kBackwardClusterThreads;
    const int64_t rounds = ceil_div(units, 4 * smaller(larger(enough, 32), bound));
    plan_.threads = round_up(ceil_div(units, 4 * rounds), 32);
    plan_.cluster = plan_.parts = blocks;
    plan_.part_length = units;
    plan_.blocks = problem_.C * blocks;
    plan_.shared = kScratchBytes + units * kVector * problem_.tensors;
    return true;
  }

  // Teams whose slabs stay within half of L2: two at least, so that one loads while the other waits, and more where
  // that leaves fewer blocks without work. Of equals the smallest number: L2 keeps what is least.
  bool persistent() {
    const int64_t slab = units_ * kVector * problem_.tensors, budget = device_.l2_bytes / 2;
    const int64_t blocks = kPersistentBlocks * device_.multiprocessors;
    // A tensor that fits is still in L2 for the second of split passes, too.
    if (!forced() && slab * problem_.C <= budget) return false;
    const int64_t most = smaller(smaller(slab > 0 ? budget / slab : 0, problem_.C), blocks);
    double best = 0;
    for (int64_t teams = smaller(2, most); 0 < teams && teams <= most; ++teams) {
      const int64_t members = blocks / teams, rounds = ceil_div(problem_.C, teams);
      const double busy = static_cast<double>(members * problem_.C) / static_cast<double>(rounds * blocks);
      if (busy <= best) continue;
      best = busy;
      plan_.teams = teams;
    }
    if (plan_.teams == 0) return false;
    plan_.parts = smaller(blocks / plan_.teams, ceil_div(units_, kShortestPart));
    plan_.part_length = ceil_div(units_, plan_.parts);
    plan_.threads = kPersistentBlockThreads;
    plan_.blocks = plan_.teams * plan_.parts;
    plan_.shared = kScratchBytes;
    return plan_.part_length * plan_.width <= kLongestPart;
  }

  void rows() {
    const int64_t C = larger(problem_.C, 1), target = kWaves * kBlocksPerMultiprocessor * device_.multiprocessors;
    int64_t parts = smaller(ceil_div(target, C), units_ / kShortestPart);
    parts = larger(larger(parts, 1), ceil_div(units_ * plan_.width, kLongestPart / 2));
    // Whole rounds of the block, so that all parts but the last are alike.
    plan_.part_length = round_up(ceil_div(larger(units_, 1), parts), kSplitBlockThreads);
    plan_.parts = larger(ceil_div(units_, plan_.part_length), 1);
    plan_.threads = kSplitBlockThreads;
    plan_.blocks = bytes_ == 0 ? 0 : problem_.C * plan_.parts;
    plan_.shared = kScratchBytes;
  }

  // Blocks that all run at the same time: each part writes C partial results and forward_channels merges them, so
  // four waves of short parts would write an eighth of the tensor once more.
  void columns() {
    const int64_t R = problem_.N * problem_.S, vectors = ceil_div(larger(problem_.C, 1), plan_.width);
    plan_.lanes = smaller(power_of_two_from(vectors), 32);
    plan_.tiles = ceil_div(vectors, plan_.lanes);
    const int64_t high = kSplitBlockThreads / plan_.lanes, shortest = 8 * high;
    const int64_t target = kColumnBlocks * device_.multiprocessors / plan_.tiles;
    const int64_t parts = larger(larger(smaller(target, R / shortest), 1), ceil_div(R, kLongestPart / 2));
    plan_.part_length = round_up(ceil_div(larger(R, 1), parts), high);
    plan_.parts = larger(ceil_div(R, plan_.part_length), 1);
    plan_.threads = kSplitBlockThreads;
    plan_.blocks = bytes_ == 0 ? 0 : plan_.tiles * plan_.parts;
    plan_.shared = kScratchBytes + kColumnValueBytes * kSplitBlockThreads;
  }

  // Tiles as wide as allow the team's blocks, one on each multiprocessor, to keep all rows of one in shared memory:
  // 128 bytes of a row, or 64, or 32, the least that memory is read in. Two teams halve a multiprocessor's memory; one
  // team has it all where no tile fits a half.
  bool team_columns() {
    const int64_t R = problem_.N * problem_.S, vectors = problem_.C / plan_.width;
    // What is read is still in L2 for the second of split passes.
    if (!forced() && problem_.tensors * bytes_ <= device_.l2_bytes / 2) return false;
    for (int64_t teams = kPersistentBlocks; teams >= 1; --teams) {
      const int64_t threads = kTeamThreads / teams;
      const int64_t shared =
          smaller(device_.shared_per_block, device_.shared_per_multiprocessor / teams - device_.shared_reserved);
      for (int64_t widest = 8; widest >= 2; widest /= 2) {
        const int64_t lanes = smaller(widest, power_of_two_from(vectors)), high = threads / lanes;
        const int64_t kept_at = kScratchBytes + threads / 32 * lanes * kColumnValueBytes;
        const int64_t row = lanes * kVector * problem_.tensors, rows = (shared - kept_at) / row;
        if (rows < 1 || ceil_div(R, rows) > device_.multiprocessors) continue;
        // The two meetings of a small tile take longer than a second read of it.
        if (!forced() && R * row < kSmallTensor) continue;
        plan_.lanes = lanes;
        plan_.tiles = ceil_div(vectors, lanes);
        plan_.part_length = larger(ceil_div(R, device_.multiprocessors), smaller(4 * high, rows));
        plan_.parts = ceil_div(R, plan_.part_length);
        plan_.teams = smaller(teams, plan_.tiles);
        plan_.threads = threads;
        plan_.blocks = plan_.teams * plan_.parts;
        plan_.kept_at = kept_at;
        plan_.shared = kept_at + plan_.part_length * row;
        return plan_.part_length <= kLongestPart;
      }
    }
    return false;
  }

  LaunchPlan finish(Strategy strategy) {
    plan_.strategy = strategy;
    int64_t at = 0;
    const auto place = [&](int64_t bytes) {
      const int64_t from = at;
      at += round_up(bytes, 256);
      return from;
    };
    const bool by_channel = strategy == Strategy::kSplit || plan_.columns;
    const int64_t slots = by_channel                          ? problem_.C * plan_.parts
                          : strategy == Strategy::kPersistent ? 2 * plan_.teams * plan_.parts
                                                              : 0;
    plan_.partials_at = place(slots * kPartBytes);
    plan_.coefficients_at = place(by_channel ? problem_.C * kCoefficientBytes : 0);
    plan_.arrivals_at = place(plan_.teams * 8);
    plan_.workspace = at;
    return plan_;
  }

  const Problem& problem_;
  const DeviceProperties& device_;
  const Wish& wish_;
  const int64_t size_, bytes_;
  int64_t units_ = 0;  // vectors of a channel's slab
  LaunchPlan plan_;
};

}  // namespace

LaunchPlan launch_plan(const Problem& problem, const DeviceProperties& device, const Wish& wish) {
  return Planner(problem, device, wish).run();
}

}  // namespace bnexport::cuda
