// Plans are pure functions: for thousands of shapes, types, layouts and devices, every element belongs to
// exactly one part, and no launch asks for more than the device has.
#include "../../../custom_ops/kernels/cuda/launch_plan.h"

#include <random>
#include <vector>

#include "../../../custom_ops/kernels/cuda/limits.h"
#include "../../../custom_ops/kernels/cuda/rows.h"
#include "../check.h"
#include "bnexport.h"

using namespace bnexport::cuda;

namespace {

struct Device {
  const char* name;
  DeviceProperties properties;
};

constexpr int64_t kKilo = 1 << 10, kMega = 1 << 20;
// Multiprocessors, shared memory of a block and of a multiprocessor, reserved, L2, largest cluster: as the
// CUDA programming guide gives them for each compute capability.
constexpr Device kDevices[] = {
    {"sm_75, small", {40, 64 * kKilo, 64 * kKilo, 0, 4 * kMega, 1}},
    {"sm_80", {108, 163 * kKilo, 164 * kKilo, kKilo, 40 * kMega, 1}},
    {"sm_86", {84, 99 * kKilo, 100 * kKilo, kKilo, 6 * kMega, 1}},
    {"sm_87, integrated", {16, 163 * kKilo, 164 * kKilo, kKilo, 4 * kMega, 1}},
    {"sm_89", {128, 99 * kKilo, 100 * kKilo, kKilo, 72 * kMega, 1}},
    {"sm_90, portable clusters", {114, 227 * kKilo, 228 * kKilo, kKilo, 50 * kMega, 8}},
    {"sm_90", {132, 227 * kKilo, 228 * kKilo, kKilo, 60 * kMega, 16}},
    {"sm_100", {148, 227 * kKilo, 228 * kKilo, kKilo, 126 * kMega, 16}},
    {"sm_120", {170, 99 * kKilo, 100 * kKilo, kKilo, 96 * kMega, 8}},
    {"one slice", {14, 227 * kKilo, 228 * kKilo, kKilo, 6 * kMega, 8}},
};

int64_t size_of(int32_t dtype) { return dtype == BNEXPORT_FLOAT64 ? 8 : dtype == BNEXPORT_FLOAT32 ? 4 : 2; }

template <int width, bool whole>
void mark_rows(const LaunchPlan& plan, const Rows& rows, int64_t c, std::vector<unsigned char>& times) {
  for (int64_t part = 0; part < plan.parts; ++part) {
    const Range range = part_of_slab(rows, c, part, plan.part_length);
    CHECK(range.end - range.begin <= plan.part_length);
    for (uint32_t index = range.begin; index < range.end; ++index) {
      const Unit unit = unit_of_slab<width, whole>(rows, range, index);
      CHECK(unit.mask == 0 || unit.offset % width == 0);
      for (int k = 0; k < width; ++k) {
        if ((unit.mask >> k & 1) != 0) ++times[static_cast<size_t>(unit.offset + k)];
      }
    }
    const Unit past = unit_of_slab<width, whole>(rows, range, range.end);
    CHECK(past.mask == 0);
  }
}

void check_cover(const Problem& p, const LaunchPlan& plan) {
  std::vector<unsigned char> times(static_cast<size_t>(p.N * p.C * p.S));
  if (plan.columns) {
    const int64_t R = p.N * p.S;
    for (int64_t part = 0; part < plan.parts; ++part) {
      for (int64_t row = part * plan.part_length; row < (part + 1) * plan.part_length && row < R; ++row) {
        for (int64_t column = 0; column < plan.tiles * plan.lanes * plan.width && column < p.C; ++column) {
          ++times[static_cast<size_t>(row * p.C + column)];
        }
      }
    }
  } else {
    const Rows rows(p.N, p.C, p.S, plan.width);
    for (int64_t c = 0; c < p.C; ++c) {
      CHECK(plan.whole == (p.S % plan.width == 0));
      if (plan.width == 1) mark_rows<1, true>(plan, rows, c, times);
      if (plan.width == 4) {
        plan.whole ? mark_rows<4, true>(plan, rows, c, times) : mark_rows<4, false>(plan, rows, c, times);
      }
      if (plan.width == 8) {
        plan.whole ? mark_rows<8, true>(plan, rows, c, times) : mark_rows<8, false>(plan, rows, c, times);
      }
      for (int64_t n = 0; n < p.N; ++n) {  // a channel takes its own rows and no others
        for (int64_t s = 0; s < p.S; ++s) CHECK(times[static_cast<size_t>((n * p.C + c) * p.S + s)] == 1);
      }
    }
  }
  for (const unsigned char count : times) CHECK(count == 1);
}

void check_limits(const Problem& p, const DeviceProperties& d, const LaunchPlan& plan) {
  const int64_t elements = p.N * p.C * p.S;
  CHECK(plan.threads % 32 == 0 && plan.threads >= 32 && plan.threads <= 1024);
  CHECK(plan.shared >= kScratchBytes && plan.shared <= d.shared_per_block);
  CHECK(plan.blocks >= 0 && plan.blocks < int64_t{1} << 31);
  CHECK((plan.blocks == 0) == (elements == 0));
  CHECK(plan.width == 1 || (p.aligned && plan.width * size_of(p.dtype) == 16));
  CHECK(plan.partials_at % 256 == 0 && plan.coefficients_at % 256 == 0 && plan.arrivals_at % 256 == 0);
  CHECK(plan.workspace >= 0 && plan.workspace % 256 == 0);
  CHECK(plan.part_length * (plan.columns ? 1 : plan.width) <= 1 << 24);  // counted in float
  if (plan.columns) {
    CHECK(plan.strategy == Strategy::kSplit || plan.strategy == Strategy::kPersistent);
    CHECK(plan.lanes <= 32 && (plan.lanes & (plan.lanes - 1)) == 0 && p.C % plan.width == 0);
    CHECK(plan.tiles * plan.lanes * plan.width >= p.C);
    if (plan.strategy == Strategy::kPersistent) {
      const int64_t row = plan.lanes * 16 * p.tensors, warps = plan.threads / 32;
      CHECK(p.one_launch && plan.width > 1 && elements > 0);
      CHECK(plan.teams >= 1 && plan.teams <= plan.tiles && plan.blocks == plan.teams * plan.parts);
      CHECK(plan.parts <= d.multiprocessors && (plan.parts - 1) * plan.part_length < p.N * p.S);
      CHECK(plan.kept_at % 16 == 0 && plan.kept_at >= kScratchBytes + warps * plan.lanes * kColumnValueBytes);
      CHECK(plan.shared >= plan.kept_at + plan.part_length * row);
      // Two teams have a block each on a multiprocessor, all at once.
      CHECK(plan.threads == kTeamThreads || plan.threads == kTeamThreads / 2);
      CHECK(plan.teams * plan.threads <= kTeamThreads);
      CHECK(plan.teams * (plan.shared + d.shared_reserved) <= d.shared_per_multiprocessor);
      CHECK(plan.workspace - plan.arrivals_at >= plan.teams * 8);
      CHECK((plan.tiles / plan.teams + 1) * plan.parts < int64_t{1} << 32);  // the count of arrivals
    } else {
      CHECK(plan.blocks == 0 || plan.blocks == plan.tiles * plan.parts);
    }
    CHECK(plan.parts * plan.part_length >= p.N * p.S);
    CHECK(plan.coefficients_at - plan.partials_at >= plan.parts * p.C * kPartBytes);
    CHECK(plan.arrivals_at - plan.coefficients_at >= p.C * kCoefficientBytes);
    return;
  }
  const Rows rows(p.N, p.C, p.S, plan.width);
  const int64_t units = rows.slab_units();
  CHECK(plan.parts * plan.part_length >= units);
  // Indices of a part have 32 bits, the quotients 31.
  CHECK(static_cast<int64_t>(rows.units.divisor) + plan.part_length + 4 * plan.threads < int64_t{1} << 31);
  if (plan.strategy == Strategy::kCluster) {
    CHECK(plan.cluster <= d.largest_cluster && (plan.cluster & (plan.cluster - 1)) == 0 && plan.parts == plan.cluster);
    CHECK(plan.blocks == p.C * plan.cluster &&
          plan.threads <= (p.tensors == 1 ? kForwardClusterThreads : kBackwardClusterThreads));
    CHECK(plan.shared >= kScratchBytes + plan.part_length * 16 * p.tensors);
  } else {
    CHECK(plan.cluster == 1);
  }
  if (plan.strategy == Strategy::kPersistent) {
    CHECK(plan.teams >= 1 && plan.teams <= p.C && plan.blocks == plan.teams * plan.parts);
    CHECK(plan.blocks <= kPersistentBlocks * d.multiprocessors && plan.threads == kPersistentBlockThreads);
    CHECK(plan.teams * units * 16 * p.tensors <= d.l2_bytes / 2);
    CHECK(plan.workspace - plan.arrivals_at >= plan.teams * 4);
    CHECK(plan.coefficients_at - plan.partials_at >= 2 * plan.teams * plan.parts * kPartBytes);
    CHECK((p.C / plan.teams + 1) * plan.parts < int64_t{1} << 32);  // the count of arrivals
  }
  if (plan.strategy == Strategy::kSplit) {
    CHECK(plan.blocks == 0 || plan.blocks == p.C * plan.parts);
    CHECK(plan.coefficients_at - plan.partials_at >= plan.parts * p.C * kPartBytes);
    CHECK(plan.arrivals_at - plan.coefficients_at >= p.C * kCoefficientBytes);
  }
  if (plan.strategy == Strategy::kCluster || plan.strategy == Strategy::kPersistent) {
    CHECK(p.one_launch && plan.width > 1 && elements > 0);
  }
}

const Wish kWishes[] = {{Strategy::kAutomatic, 0}, {Strategy::kSplit, 0},     {Strategy::kCluster, 0},
                        {Strategy::kCluster, 1},   {Strategy::kCluster, 8},   {Strategy::kCluster, 16},
                        {Strategy::kCluster, 3},   {Strategy::kPersistent, 0}};

int64_t plans = 0, fused = 0;

void check_problem(Problem p, bool cover) {
  for (int32_t dtype = 0; dtype < 4; ++dtype) {
    for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
      for (const Device& device : kDevices) {
        for (const Wish& wish : kWishes) {
          for (const int64_t tensors : {1, 2}) {
            for (const bool aligned : {true, false}) {
              p.dtype = dtype;
              p.layout = layout;
              p.tensors = tensors;
              p.aligned = aligned;
              const LaunchPlan plan = launch_plan(p, device.properties, wish);
              ++plans;
              if (plan.strategy == Strategy::kAutomatic) {
                CHECK(wish.strategy == Strategy::kCluster || wish.strategy == Strategy::kPersistent);
                continue;
              }
              if (wish.strategy != Strategy::kAutomatic) CHECK(plan.strategy == wish.strategy);
              if (wish.cluster != 0) CHECK(plan.cluster == wish.cluster);
              if (plan.strategy != Strategy::kSplit) ++fused;
              check_limits(p, device.properties, plan);
              if (cover) check_cover(p, plan);
            }
          }
        }
      }
    }
  }
}

void test_small() {
  for (const int64_t N : {1, 3, 17}) {
    for (const int64_t C : {1, 3, 8}) {
      for (const int64_t S : {1, 2, 7, 8, 9, 16, 49, 100, 1000}) {
        check_problem({N, C, S, 0, 0, 1, true, true}, N * C * S < 3000);
      }
    }
  }
}

void test_random() {
  std::mt19937_64 random(5);
  const auto up_to = [&](double log2) {
    return static_cast<int64_t>(std::exp2(log2 * static_cast<double>(random() % 1000) / 1000));
  };
  for (int i = 0; i < 300; ++i) {
    check_problem({up_to(12), up_to(14), up_to(18), 0, 0, 1, random() % 4 != 0, random() % 4 != 0}, false);
  }
}

void test_extreme() {
  for (const Problem& p :
       {Problem{1, 1, kLongestRow}, Problem{1 << 20, 1, 1 << 20}, Problem{3, kMostChannels, 1},
        Problem{1, kMostChannels, 2}, Problem{1 << 29, 1 << 15, 1}, Problem{0, 7, 9}, Problem{7, 0, 9},
        Problem{7, 9, 0}, Problem{int64_t{1} << 40, 1, 1}, Problem{1, 1 << 20, 1 << 20}}) {
    check_problem(p, false);
  }
}

// Partial results of columns cost traffic of their own: written and read once.
void test_columns() {
  for (const Device& device : kDevices) {
    const int64_t blocks = 2 * device.properties.multiprocessors;
    for (const int64_t C : {24, 64, 256, 1000, 2048, 30000}) {
      for (const int32_t dtype : {BNEXPORT_FLOAT16, BNEXPORT_FLOAT32}) {
        const Problem p{32, C, 3136, dtype, BNEXPORT_NSC, 1, true, true};
        const LaunchPlan plan = launch_plan(p, device.properties, {Strategy::kSplit, 0});
        CHECK(plan.parts == 1 || plan.blocks <= blocks);  // one wave
        CHECK(plan.tiles > blocks || plan.blocks > blocks / 2);
        const auto bytes = static_cast<double>(p.N * p.C * p.S * size_of(dtype));
        CHECK(static_cast<double>(2 * plan.parts * C * kPartBytes) <= 0.06 * 3 * bytes);
      }
    }
  }
}

// The rows of docs/design/gpu_kernels.md on an H200: which way, and how many blocks share a channel.
void test_known() {
  const DeviceProperties h200 = kDevices[6].properties;
  const auto plan = [&](int64_t N, int64_t C, int64_t S, int32_t dtype, int64_t tensors) {
    return launch_plan({N, C, S, dtype, BNEXPORT_NCS, tensors, true, true}, h200);
  };
  for (const int32_t dtype : {BNEXPORT_FLOAT16, BNEXPORT_FLOAT32}) {
    for (const int64_t tensors : {1, 2}) {
      CHECK(plan(32, 256, 3136, dtype, tensors).strategy == Strategy::kCluster);
      CHECK(plan(16, 64, 12544, dtype, tensors).strategy == Strategy::kCluster);
      CHECK(plan(2, 512, 32768, dtype, tensors).strategy == Strategy::kCluster);
      CHECK(plan(8, 2048, 512, dtype, tensors).strategy == Strategy::kCluster);
      CHECK(plan(8, 2048, 512, dtype, tensors).cluster == 1);
    }
  }
  // Half tiles, two on a multiprocessor, where eight blocks would have one each.
  const LaunchPlan halves = plan(256, 64, 3136, BNEXPORT_FLOAT16, 1);
  CHECK(halves.cluster == 16 && 2 * (halves.shared + h200.shared_reserved) <= h200.shared_per_multiprocessor);
  const DeviceProperties& portable = kDevices[5].properties;
  CHECK(launch_plan({256, 64, 3136, BNEXPORT_FLOAT16, BNEXPORT_NCS, 1, true, true}, portable).cluster == 8);
  CHECK(plan(256, 64, 3136, BNEXPORT_FLOAT16, 2).cluster == 16);
  CHECK(plan(256, 64, 3136, BNEXPORT_FLOAT32, 1).cluster == 16);
  CHECK(plan(256, 64, 3136, BNEXPORT_FLOAT32, 2).strategy == Strategy::kPersistent);
  // Of numbers of teams that leave no block without work, the one that L2 keeps best.
  const LaunchPlan stem = plan(256, 64, 12544, BNEXPORT_FLOAT16, 1);
  CHECK(stem.strategy == Strategy::kPersistent && stem.teams == 2);
  CHECK(plan(256, 63, 12544, BNEXPORT_FLOAT16, 1).teams == 3);
  CHECK(plan(256, 1, 3211264, BNEXPORT_FLOAT32, 1).strategy == Strategy::kSplit);
  // Without clusters a slab of 401 KB goes by teams, a small one still stays in one block.
  const DeviceProperties& sm80 = kDevices[1].properties;
  CHECK(launch_plan({32, 256, 3136, BNEXPORT_FLOAT32, BNEXPORT_NCS, 1, true, true}, sm80).strategy ==
        Strategy::kPersistent);
  CHECK(launch_plan({8, 2048, 512, BNEXPORT_FLOAT32, BNEXPORT_NCS, 1, true, true}, sm80).strategy ==
        Strategy::kCluster);
}

// Channels last: one read where teams can keep a tile of channels, and two where they cannot, or where the second
// read is from L2 or costs less than two meetings.
void test_teams() {
  const DeviceProperties h100 = {132, 227 * kKilo, 228 * kKilo, kKilo, 50 * kMega, 16};
  const auto plan = [&](int64_t C, int64_t S, int64_t tensors, int32_t dtype = BNEXPORT_FLOAT16) {
    return launch_plan({256, C, S, dtype, BNEXPORT_NSC, tensors, true, true}, h100);
  };
  const auto is = [](const LaunchPlan& plan, int64_t teams, int64_t lanes) {
    return plan.strategy == Strategy::kPersistent && plan.teams == teams && plan.lanes == lanes &&
           plan.threads == (teams == 2 ? 256 : 512);
  };
  for (const int64_t C : {64, 128, 256}) {
    CHECK(is(plan(C, 3136, 1), 1, 2));  // 26 MB, more than half of the shared memory
    CHECK(plan(C, 3136, 2).strategy == Strategy::kSplit);
  }
  CHECK(plan(64, 12544, 1).strategy == Strategy::kSplit);
  CHECK(is(plan(128, 784, 1), 2, 4) && is(plan(512, 784, 2), 2, 2));
  CHECK(is(plan(1024, 196, 1), 2, 8) && is(plan(1024, 196, 2), 2, 8));
  CHECK(plan(2048, 49, 1).strategy == Strategy::kSplit);  // tiles of 1.6 MB
  CHECK(plan(256, 196, 1).strategy == Strategy::kSplit);  // 26 MB, which L2 keeps
  CHECK(is(plan(256, 196, 2), 2, 8));
  CHECK(plan(512, 3136, 1, BNEXPORT_FLOAT64).strategy == Strategy::kSplit);
}

}  // namespace

int main() {
  test_small();
  test_random();
  test_extreme();
  test_columns();
  test_known();
  test_teams();
  CHECK(fused > 1000);
  std::printf("launch plan: ok (%lld plans, %lld of them in one launch)\n", static_cast<long long>(plans),
              static_cast<long long>(fused));
  return 0;
}
