// Plans are pure functions of a shape: every element belongs to exactly one block, task and stretch.
#include "../../custom_ops/kernels/cpu/batch_norm/plan.h"

#include <vector>

#include "check.h"

using namespace bnexport::cpu;

namespace {

struct Cover {
  std::vector<int> times;
  std::vector<int64_t> channel;
  int64_t C, S;
  Cover(int64_t N, int64_t C, int64_t S) : times(static_cast<size_t>(N * C * S)), C(C), S(S) {}
  void rows(int64_t offset, const Span& span, int64_t c, int64_t channels) {
    for (int64_t r = 0; r < span.rows; ++r) {
      for (int64_t k = 0; k < channels; ++k) {
        for (int64_t i = 0; i < span.cols; ++i) {
          const int64_t at = offset + r * span.stride + k * span.cols + i;
          CHECK(at / S % C == c + k);
          ++times[static_cast<size_t>(at)];
        }
      }
    }
  }
  void once() const {
    for (const int count : times) CHECK(count == 1);
  }
};

void test_rows(int64_t N, int64_t C, int64_t S) {
  const RowPlan plan(N, C, S);
  std::vector<std::vector<int>> order(static_cast<size_t>(C));
  Cover by_group(N, C, S), by_task(N, C, S), stream(N, C, S);
  const int64_t half = C / 2;
  for (const auto& [first, last] : {std::pair{int64_t{0}, half}, std::pair{half, C}}) {
    plan.each_block(first, last, [&](int64_t b, int64_t offset, Span span, int64_t c, int64_t channels) {
      CHECK(span.cols >= kShortestRow && b < plan.blocks && span.rows * span.cols <= kBlock);
      for (int64_t k = 0; k < channels; ++k) order[static_cast<size_t>(c + k)].push_back(static_cast<int>(b));
      by_group.rows(offset, span, c, channels);
    });
  }
  for (const auto& blocks : order) {
    CHECK(static_cast<int64_t>(blocks.size()) == plan.blocks);
    for (size_t i = 0; i < blocks.size(); ++i) CHECK(blocks[i] == static_cast<int>(i));
  }
  for (int64_t task = 0; task < plan.tasks(); ++task) {
    plan.each_block_of_task(task, [&](int64_t, int64_t offset, Span span, int64_t c, int64_t channels) {
      by_task.rows(offset, span, c, channels);
    });
  }
  const StreamPlan stretches(N, C, S);
  for (int64_t task = 0; task < stretches.tasks; ++task) {
    stretches.each(task, [&](int64_t offset, int64_t length, int64_t c, int64_t channels) {
      CHECK(length >= kShortestRow);
      stream.rows(offset, {1, length, length}, c, channels);
    });
  }
  by_group.once();
  by_task.once();
  stream.once();
}

void test_columns(int64_t N, int64_t C, int64_t S, bool channels_last) {
  const ColumnPlan plan(N, C, S, channels_last, 4);
  std::vector<int> times(static_cast<size_t>(N * C * S));
  for (int64_t k = 0; k < plan.all_chunks(); ++k) {
    Span span;
    const int64_t offset = plan.chunk(k, 0, plan.cols, &span);
    CHECK(span.stride == span.cols && span.cols <= plan.cols);
    for (int64_t i = 0; i < span.rows * span.cols; ++i) {
      const int64_t at = offset + i, channel = channels_last ? at % C : at / S % C;
      CHECK(i % span.cols / plan.inner % C == channel);
      ++times[static_cast<size_t>(at)];
    }
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
  for (const int64_t S : {16, 17, 49, 63, 64, 1000, 4095, 4096, 4097, 8193, 32768, 32769, 70001}) {
    test_rows(1, 1, S);
    test_rows(3, 5, S);
  }
  test_rows(200, 3, 20);
  test_rows(9, 700, 49);
  for (const bool last : {false, true}) {
    for (const int64_t C : {1, 3, 63, 64, 65, 700}) {
      test_columns(1, C, 1, last);
      test_columns(7, C, 5, last);
      test_columns(500, C, 3, last);
    }
  }
  test_groups();
  std::printf("plan: ok\n");
  return 0;
}
