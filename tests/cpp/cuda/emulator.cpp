#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <unordered_set>
#include <vector>

#include "../../../custom_ops/kernels/cuda/device.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

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
  // What it waits for; none of them: it can run.
  const uint64_t* generation = nullptr;
  uint64_t unwanted = 0;
  const uint32_t* counter = nullptr;
  uint32_t count = 0;
  const char* what = nullptr;
  bool done = false;

  bool ready() const {
    if (done) return false;
    if (generation != nullptr) return *generation != unwanted;
    return counter == nullptr || *counter >= count;
  }
};

ucontext_t scheduler;
Fiber* running = nullptr;
const std::function<void()>* body = nullptr;
#if defined(__SANITIZE_ADDRESS__)
const void* scheduler_stack = nullptr;
size_t scheduler_size = 0;
#endif

std::vector<std::unique_ptr<unsigned char[]>>& stacks() {
  static std::vector<std::unique_ptr<unsigned char[]>> all;
  return all;
}

void to_scheduler(bool last) {
  Fiber* me = running;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(last ? nullptr : &fake, scheduler_stack, scheduler_size);
  swapcontext(&me->context, &scheduler);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  (void)last;
  swapcontext(&me->context, &scheduler);
#endif
}

void enter() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
#endif
  (*body)();
  running->done = true;
  to_scheduler(true);
}

void resume(Fiber& fiber, [[maybe_unused]] size_t index) {
  fiber.generation = nullptr;
  fiber.counter = nullptr;
  running = &fiber;
  current = &fiber.thread;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, stacks()[index].get(), kStack);
  swapcontext(&scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  swapcontext(&scheduler, &fiber.context);
#endif
}

// Apart, since getcontext returns twice as far as the compiler knows.
[[gnu::noinline]] void prepare(Fiber& fiber, unsigned char* stack) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
}

// Blocks first .. first + count - 1, at the same time.
void run_blocks(const Shape& shape, int64_t first, int64_t count, std::mt19937& random) {
  const auto threads = static_cast<size_t>(shape.threads), blocks = static_cast<size_t>(count);
  std::vector<std::vector<unsigned char>> shared(blocks);
  std::vector<std::vector<Warp>> warps(blocks);
  std::vector<Block> all(blocks);
  std::vector<Block*> pointers(blocks);
  const auto clusters = static_cast<size_t>(count / shape.cluster);
  std::vector<Cluster> cluster(clusters);
  for (size_t b = 0; b < blocks; ++b) {
    shared[b].assign(static_cast<size_t>(shape.shared), 0xff);
    warps[b].resize(threads / kWarp);
    for (Warp& warp : warps[b]) warp.barrier.expected = kWarp;
    Block& block = all[b];
    block.index = first + static_cast<int64_t>(b);
    block.rank = static_cast<int>(block.index % shape.cluster);
    block.threads = static_cast<int>(shape.threads);
    block.shared = shared[b].data();
    block.barrier.expected = block.threads;
    block.warps = warps[b].data();
    block.cluster = &cluster[b / static_cast<size_t>(shape.cluster)];
    pointers[b] = &block;
  }
  for (size_t i = 0; i < clusters; ++i) {
    cluster[i].size = static_cast<int>(shape.cluster);
    cluster[i].barrier.expected = static_cast<int>(shape.cluster * shape.threads);
    cluster[i].blocks = pointers.data() + i * static_cast<size_t>(shape.cluster);
  }
  std::vector<Fiber> fibers(blocks * threads);
  std::vector<size_t> order(fibers.size());
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber& fiber = fibers[i];
    if (stacks().size() <= i) stacks().emplace_back(new unsigned char[kStack]);
    fiber.thread.index = static_cast<int>(i % threads);
    fiber.thread.block = &all[i / threads];
    prepare(fiber, stacks()[i].get());
    order[i] = i;
  }
  for (size_t left = fibers.size(); left > 0;) {
    // A cheap shuffle: swaps with random places, new in every round.
    for (size_t i = 0; i < order.size(); ++i) std::swap(order[i], order[random() % order.size()]);
    bool ran = false;
    for (const size_t i : order) {
      if (!fibers[i].ready()) continue;
      resume(fibers[i], i);
      ran = true;
      if (fibers[i].done) --left;
    }
    if (!ran) {
      for (const Fiber& fiber : fibers) {
        if (!fiber.done) fail(fiber.what);
      }
    }
  }
}

}  // namespace

namespace {

constexpr uintptr_t kSector = 32;
std::unordered_set<uintptr_t> sectors[2];  // loaded, stored

}  // namespace

void touch(const void* at, bool stores) {
  if (traffic >= 0) sectors[stores ? 1 : 0].insert(reinterpret_cast<uintptr_t>(at) / kSector);
}

void arrive(Barrier& barrier) {
  if (++barrier.arrived < barrier.expected) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

void pass(const uint64_t* value, uint64_t unwanted, const char* what) {
  if (*value != unwanted) return;
  running->generation = value;
  running->unwanted = unwanted;
  running->what = what;
  to_scheduler(false);
}

void wait_for_count(const uint32_t* counter, uint32_t count) {
  if (*counter >= count) return;
  running->counter = counter;
  running->count = count;
  running->what = "a count of arrivals";
  to_scheduler(false);
}

void fail(const char* what) {
  std::fprintf(stderr, "emulated device: %s (deadlock, or not allowed)\n", what);
  std::exit(1);
}

void run(const Shape& shape, uint32_t seed, const std::function<void()>& kernel) {
  if (shape.threads % kWarp != 0 || shape.threads < kWarp || shape.threads > 1024) fail("threads of a block");
  if (shape.blocks < 1 || shape.blocks % shape.cluster != 0) fail("blocks of a launch");
  std::mt19937 random(seed);
  body = &kernel;
  grid = shape.blocks;
  const int64_t step = shape.together ? shape.blocks : shape.cluster;
  std::vector<int64_t> starts;
  for (int64_t first = 0; first < shape.blocks; first += step) starts.push_back(first);
  for (size_t i = 0; i < starts.size(); ++i) std::swap(starts[i], starts[random() % starts.size()]);
  for (const int64_t first : starts) run_blocks(shape, first, step, random);
  current = nullptr;
  for (auto& touched : sectors) {
    if (traffic >= 0) traffic += static_cast<int64_t>(touched.size() * kSector);
    touched.clear();
  }
}

}  // namespace emulator

float half_to_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float value = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                      : exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                       : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return (bits & 0x8000) != 0 ? -value : value;
}

uint16_t float_to_half(float value) {
  const auto sign = static_cast<uint16_t>(float_to_bits(value) >> 16 & 0x8000);
  if (std::isnan(value)) return sign | 0x7e00;
  const float size = std::fabs(value);
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size == 0) return sign;
  int exponent;
  std::frexp(size, &exponent);
  // A unit of the last place, 2^-24 at the least; nearbyint rounds to nearest even.
  const int unit = exponent - 11 < -24 ? -24 : exponent - 11;
  const auto fraction = static_cast<uint16_t>(std::nearbyint(std::ldexp(size, -unit)));
  return static_cast<uint16_t>(sign | (fraction + static_cast<uint16_t>((unit + 24) << 10)));
}

uint16_t float_to_bfloat(float value) {
  const uint32_t bits = float_to_bits(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace bnexport::cuda
