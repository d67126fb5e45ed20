// For thousands of shapes, types, layouts and devices the parts' counts are right, and no plan exceeds what kernels
// count with. That every element belongs to exactly one part, the kernels on the emulated device show.
#include "../../../custom_ops/kernels/cuda/launch_plan.h"

#include <random>
#include <vector>

#include "../../../custom_ops/kernels/common/statistics.h"
#include "../../../custom_ops/kernels/cuda/rows.h"
#include "../check.h"
#include "bnexport.h"

using namespace bnexport;
using namespace bnexport::cuda;

namespace {

constexpr int64_t kDevices[] = {1, 6, 14, 40, 84, 108, 132, 148, 192};  // multiprocessors

int64_t size_of(int32_t dtype) { return dtype == BNEXPORT_FLOAT64 ? 8 : dtype == BNEXPORT_FLOAT32 ? 4 : 2; }

void check_limits(const Problem& p, const LaunchPlan& plan) {
  const int64_t elements = p.N * p.C * p.S;
  CHECK(plan.blocks >= 0 && plan.blocks < int64_t{1} << 31);
  CHECK((plan.blocks == 0) == (elements == 0));
  CHECK(plan.width == 1 || (p.aligned && (plan.columns ? plan.width == 4 : plan.width * size_of(p.dtype) == 16)));
  CHECK(plan.coefficients_at % 256 == 0 && plan.workspace % 256 == 0);
  CHECK(plan.coefficients_at >= plan.parts * p.C * static_cast<int64_t>(sizeof(Moments)));
  CHECK(plan.workspace - plan.coefficients_at >= p.C * static_cast<int64_t>(sizeof(BackwardCoefficients)));
  CHECK(plan.part_length * (plan.columns ? 1 : plan.width) <= 1 << 24);  // counted in float
  CHECK(plan.side_by_side >= 4 && plan.side_by_side <= 128 && kThreads % plan.side_by_side == 0);
  if (elements == 0) return;
  if (plan.columns) {
    CHECK(plan.lanes <= 32 && (plan.lanes & (plan.lanes - 1)) == 0 && p.C % plan.width == 0);
    CHECK(plan.tiles * plan.lanes * plan.width >= p.C);
    CHECK(plan.blocks == 0 || plan.blocks == plan.tiles * plan.parts);
    CHECK(plan.parts * plan.part_length >= p.N * p.S &&
          (plan.parts == 1 || (plan.parts - 1) * plan.part_length < p.N * p.S));
    return;
  }
  const Rows rows(p.N, p.C, p.S, plan.width);
  CHECK(plan.parts * plan.part_length >= rows.slab_units());
  // Indices of a part have 32 bits, the quotients 31.
  CHECK(static_cast<int64_t>(rows.units.divisor) + plan.part_length + 4 * 256 < int64_t{1} << 31);
  CHECK(plan.blocks == 0 || plan.blocks == p.C * plan.parts);
}

int64_t plans = 0;

void check_problem(Problem p) {
  for (int32_t dtype = 0; dtype < 4; ++dtype) {
    for (const int32_t layout : {BNEXPORT_NCS, BNEXPORT_NSC}) {
      for (const int64_t device : kDevices) {
        for (const bool aligned : {true, false}) {
          p.dtype = dtype;
          p.layout = layout;
          p.aligned = aligned;
          const LaunchPlan plan = launch_plan(p, device);
          ++plans;
          check_limits(p, plan);
        }
      }
    }
  }
}

void test_small() {
  for (const int64_t N : {1, 3, 17}) {
    for (const int64_t C : {1, 3, 8}) {
      for (const int64_t S : {1, 2, 7, 8, 9, 16, 49, 100, 1000}) check_problem({N, C, S});
    }
  }
}

void test_random() {
  std::mt19937_64 random(5);
  const auto up_to = [&](double log2) {
    return static_cast<int64_t>(std::exp2(log2 * static_cast<double>(random() % 1000) / 1000));
  };
  for (int i = 0; i < 300; ++i) check_problem({up_to(12), up_to(14), up_to(18)});
}

void test_extreme() {
  for (const Problem& p : {Problem{1, 1, kLongestRow}, Problem{1 << 20, 1, 1 << 20}, Problem{3, kMostChannels, 1},
                           Problem{1, kMostChannels, 2}, Problem{1 << 29, 1 << 14, 1}, Problem{0, 7, 9},
                           Problem{7, 0, 9}, Problem{7, 9, 0}, Problem{int64_t{1} << 40, 1, 1}}) {
    check_problem(p);
  }
}

// Offsets beyond 32 bits, in elements.
void test_offsets() {
  const int64_t C = 64, S = int64_t{1} << 20;
  const Rows rows(1 << 10, C, S, 8);
  const int64_t units = rows.units.divisor;
  for (const int64_t row : {63, 64, 100, 1000}) {
    const Range whole{3 * S, 0, static_cast<uint32_t>(units * 1024)};
    CHECK((unit_of_slab<8, true>(rows, whole, static_cast<uint32_t>(row * units + 5)).offset) ==
          row * C * S + 3 * S + 40);
    CHECK(part_of_slab(rows, 3, row, units).origin == row * C * S + 3 * S);
  }
}

// Partial results cost traffic of their own: written and read once.
void test_columns() {
  for (const int64_t device : kDevices) {
    for (const int64_t C : {24, 64, 256, 1000, 2048, 30000}) {
      for (const int32_t dtype : {BNEXPORT_FLOAT16, BNEXPORT_FLOAT32}) {
        const Problem p{32, C, 3136, dtype, BNEXPORT_NSC};
        const LaunchPlan plan = launch_plan(p, device);
        CHECK(plan.parts == 1 || plan.blocks <= kBlocks * device);  // one wave
        CHECK(plan.tiles > device || plan.blocks >= device);
        CHECK(2 * plan.parts * C * 24 <= 0.06 * static_cast<double>(3 * p.N * p.C * p.S * size_of(dtype)));
      }
    }
  }
}

}  // namespace

int main() {
  test_small();
  test_random();
  test_extreme();
  test_offsets();
  test_columns();
  std::printf("launch plan: ok (%lld plans)\n", static_cast<long long>(plans));
  return 0;
}
