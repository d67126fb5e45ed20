// What a plan chooses for a shape; that every element belongs to exactly one block and task, test_kernels sees in the
// results.
#include "../../custom_ops/kernels/cpu/batch_norm/plan.h"

#include <vector>

#include "check.h"

using namespace bnexport::cpu;

namespace {

// Stretches, which only tensors past the caches go by: each element once, in its channel.
void test_stretches(int64_t N, int64_t C, int64_t S) {
  const StreamPlan plan(N, C, S);
  std::vector<int> times(static_cast<size_t>(N * C * S));
  for (int64_t task = 0; task < plan.tasks; ++task) {
    plan.each(task, [&](int64_t offset, int64_t length, int64_t c, int64_t channels) {
      CHECK(length >= kShortestRow && offset / S % C == c && c + channels <= C);
      for (int64_t i = 0; i < channels * length; ++i) ++times[static_cast<size_t>(offset + i)];
    });
  }
  for (const int count : times) CHECK(count == 1);
}

void test_groups() {
  const Caches caches{int64_t{1} << 20, int64_t{32} << 20};
  // Few channels for many threads, and slabs past the cache: two passes.
  CHECK(GroupPlan(RowPlan(8, 3, 50176), 4, 1, 2, caches).channels == 0);
  CHECK(GroupPlan(RowPlan(4096, 64, 3136), 4, 1, 2, caches).channels == 0);
  // A large tensor goes by groups whose stretches are long; a tiny one in one go.
  const GroupPlan large(RowPlan(32, 256, 3136), 4, 1, 2, caches);
  CHECK(large.channels * 3136 * 4 >= kRun && large.groups >= 4);
  CHECK(GroupPlan(RowPlan(1, 8, 64), 4, 1, 2, caches).groups == 1);
  for (const int64_t width : {1, 2, 64}) {
    for (const int64_t C : {1, 7, 300, 5000}) {
      const GroupPlan plan(RowPlan(8, C, 49), 4, 2, width, caches);
      CHECK(plan.channels <= kMostChannels);
      if (plan.channels > 0) CHECK(plan.channels * plan.groups >= C && plan.channels * (plan.groups - 1) < C);
    }
  }
}

}  // namespace

int main() {
  for (const int64_t S : {16, 17, 49, 1000, 4096, 4097, 32768, 32769, 70001}) {
    test_stretches(2, 1, S);
    test_stretches(3, 5, S);
  }
  test_stretches(40, 3, 1000);
  test_groups();
  std::printf("plan: ok\n");
  return 0;
}
