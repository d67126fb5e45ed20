#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <unordered_set>
#include <vector>

#include "../../../custom_ops/kernels/cuda/device.h"

namespace bnexport::cuda {

namespace emulator {

Thread* current = nullptr;
int64_t traffic = -1;
int64_t grid = 0;

namespace {

constexpr size_t kStack = size_t{1} << 16;

struct Fiber {
  Thread thread;
  ucontext_t context;
  // The barrier that it waits for while its generation is `unwanted`; null: it can run.
  const Barrier* barrier = nullptr;
  uint64_t unwanted = 0;
  const char* what = nullptr;
  bool done = false;

  bool ready() const { return !done && (barrier == nullptr || barrier->generation != unwanted); }
};

ucontext_t scheduler;
Fiber* running = nullptr;
const std::function<void()>* body = nullptr;

std::vector<std::unique_ptr<unsigned char[]>>& stacks() {
  static std::vector<std::unique_ptr<unsigned char[]>> all;
  return all;
}

void to_scheduler() { swapcontext(&running->context, &scheduler); }

void enter() {
  (*body)();
  running->done = true;
  to_scheduler();
}

void resume(Fiber& fiber) {
  fiber.barrier = nullptr;
  running = &fiber;
  current = &fiber.thread;
  swapcontext(&scheduler, &fiber.context);
}

// Apart, since getcontext returns twice as far as the compiler knows.
[[gnu::noinline]] void prepare(Fiber& fiber, unsigned char* stack) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
}

// Runs some blocks at the same time.
void run_blocks(const std::vector<int64_t>& indices, int64_t shared_bytes, std::mt19937& random) {
  const size_t blocks = indices.size();
  std::vector<std::vector<unsigned char>> shared(blocks);
  std::vector<std::vector<Warp>> warps(blocks);
  std::vector<Block> all(blocks);
  for (size_t b = 0; b < blocks; ++b) {
    shared[b].assign(static_cast<size_t>(shared_bytes), 0xff);
    warps[b].resize(kThreads / kWarp);
    for (Warp& warp : warps[b]) warp.barrier.expected = kWarp;
    all[b].index = indices[b];
    all[b].shared = shared[b].data();
    all[b].shared_bytes = shared_bytes;
    all[b].writes.resize(static_cast<size_t>(shared_bytes / 4));
    all[b].reads.resize(all[b].writes.size());
    all[b].barrier.expected = kThreads;
    all[b].warps = warps[b].data();
  }
  std::vector<Fiber> fibers(blocks * kThreads);
  std::vector<size_t> order(fibers.size());
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber& fiber = fibers[i];
    if (stacks().size() <= i) stacks().emplace_back(new unsigned char[kStack]);
    fiber.thread.index = static_cast<int>(i % kThreads);
    fiber.thread.block = &all[i / kThreads];
    prepare(fiber, stacks()[i].get());
    order[i] = i;
  }
  size_t slow = blocks;  // the block that gets no turn, for so many rounds
  int64_t slow_for = 0;
  for (size_t left = fibers.size(); left > 0;) {
    // A cheap shuffle: swaps with random places, new in every round.
    for (size_t i = 0; i < order.size(); ++i) std::swap(order[i], order[random() % order.size()]);
    if (slow_for-- <= 0) {
      slow = random() % (2 * blocks);
      slow_for = static_cast<int64_t>(random() % 200);
    }
    bool ran = false;
    for (const size_t i : order) {
      if (!fibers[i].ready() || i / kThreads == slow) continue;
      resume(fibers[i]);
      ran = true;
      if (fibers[i].done) --left;
    }
    if (ran) continue;
    if (slow < blocks) {
      slow = blocks;
      slow_for = 0;
      continue;
    }
    for (const Fiber& fiber : fibers) {
      if (!fiber.done) fail(fiber.what);
    }
  }
}

constexpr uintptr_t kSector = 32;
std::unordered_set<uintptr_t> sectors[2];  // loaded, stored

uint64_t now = 0;
Access this_access() { return {current->index, current->block->barrier.generation, ++now}; }

// Whether an access of the running block came before, for the running thread.
bool is_before_me(const Access& access) {
  return access.thread == current->index || access.epoch < current->block->barrier.generation;
}

}  // namespace

void touch(const void* at, bool stores) {
  if (traffic >= 0) sectors[stores ? 1 : 0].insert(reinterpret_cast<uintptr_t>(at) / kSector);
}

void check_shared(const void* at, size_t bytes, size_t alignment, bool stores) {
  Block& block = *current->block;
  const int64_t offset = static_cast<const unsigned char*>(at) - block.shared;
  if (offset < 0 || offset + static_cast<int64_t>(bytes) > block.shared_bytes) fail("an access behind shared memory");
  if (static_cast<size_t>(offset) % alignment != 0) fail("an access of shared memory that is not aligned");
  for (size_t word = static_cast<size_t>(offset) / 4; word < (static_cast<size_t>(offset) + bytes) / 4; ++word) {
    Access &write = block.writes[word], &read = block.reads[word];
    if (write.time == 0 && !stores) fail("a read of shared memory that nobody wrote");
    if (write.time != 0 && !is_before_me(write)) fail("shared memory that another thread wrote, without a barrier");
    if (stores && read.time != 0 && !is_before_me(read))
      fail("shared memory that another thread reads, without a barrier");
    if (stores) {
      write = this_access();
    } else if (read.time == 0 || is_before_me(read)) {
      read = this_access();
    } else {
      read.thread = -1;  // several since the last barrier
    }
  }
}

void arrive(Barrier& barrier) {
  if (++barrier.arrived < barrier.expected) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

void meet(Barrier& barrier, const char* what) {
  const uint64_t generation = barrier.generation;
  arrive(barrier);
  if (barrier.generation != generation) return;
  running->barrier = &barrier;
  running->unwanted = generation;
  running->what = what;
  to_scheduler();
}

void fail(const char* what) {
  std::fprintf(stderr, "emulated device: %s (deadlock, or not allowed)\n", what);
  std::_Exit(1);
}

void run(int64_t blocks, int64_t shared, uint32_t seed, const std::function<void()>& kernel) {
  if (blocks < 1) fail("blocks of a launch");
  std::mt19937 random(seed);
  body = &kernel;
  grid = blocks;
  std::vector<int64_t> order(static_cast<size_t>(blocks));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  for (size_t i = 0; i < order.size(); ++i) std::swap(order[i], order[random() % order.size()]);
  for (size_t first = 0; first < order.size();) {
    const size_t last = std::min(order.size(), first + 1 + random() % 4);
    run_blocks({order.begin() + static_cast<int64_t>(first), order.begin() + static_cast<int64_t>(last)}, shared,
               random);
    first = last;
  }
  current = nullptr;
  for (auto& touched : sectors) {
    if (traffic >= 0) traffic += static_cast<int64_t>(touched.size() * kSector);
    touched.clear();
  }
}

}  // namespace emulator

}  // namespace bnexport::cuda
