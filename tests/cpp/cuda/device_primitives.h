// The primitives of custom_ops/kernels/cuda/device.h on the host: one fiber for each CUDA thread.
//
// A fiber runs until it waits for others (a block's barrier, a warp's shuffle); which one runs next is random, and one
// block at a time is starved. Where threads exchange values in shared memory, each access is checked against a shadow
// that knows who wrote last and which barriers came since: a missing barrier ends the program with a message in any
// order of the threads. Barriers that not all threads reach do, too. Shared memory is as large as was asked for, and is
// not initialised. So does a kernel that reads another one's results before it has waited for them.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "../halves.h"

#define BNEXPORT_KERNEL inline void
#define BNEXPORT_DEVICE inline
#define BNEXPORT_ARGUMENTS const

namespace bnexport::cuda {

namespace emulator {

struct Barrier {
  int expected = 0, arrived = 0;
  uint64_t generation = 0;
};

// What the running fiber sees of itself.
struct Thread {
  int index = 0;
  struct Block* block = nullptr;
  int shuffles = 0;  // so far; two buffers in turn
  bool has_waited = false;
};

constexpr int kShuffleBytes = 160;
struct Warp {
  Barrier barrier;
  alignas(16) unsigned char slots[2][kWarp][kShuffleBytes];
};

// An access: its thread, the number of block barriers before it, and when it happened.
struct Access {
  int thread = -1;
  uint64_t epoch = 0, time = 0;
};
struct Block {
  int64_t index = 0;
  unsigned char* shared = nullptr;
  int64_t shared_bytes = 0;
  std::vector<Access> writes, reads;  // the last of each word of shared memory
  Barrier barrier;
  Warp* warps = nullptr;
};

extern Thread* current;

// Bytes of the 32-byte sectors that launches load and store, each sector once a launch: what memory moves when a
// launch's second read comes from caches. Counted while it is not negative.
extern int64_t traffic;
void touch(const void* at, bool stores);
extern int64_t grid;

void arrive(Barrier& barrier);
void meet(Barrier& barrier, const char* what);
[[noreturn]] void fail(const char* what);

// Accesses of `bytes` that threads exchange through shared memory.
void check_shared(const void* at, size_t bytes, size_t alignment, bool stores);

// Blocks of kThreads with `shared` bytes; a few at a time.
void run(int64_t blocks, int64_t shared, uint32_t seed, const std::function<void()>& kernel);

}  // namespace emulator

inline int thread_index() { return emulator::current->index; }
inline int block_index() { return static_cast<int>(emulator::current->block->index); }
inline int block_count() { return static_cast<int>(emulator::grid); }
inline unsigned char* shared_memory() { return emulator::current->block->shared; }
inline void start_next() {}
inline void wait_for_previous() { emulator::current->has_waited = true; }
inline void fetch(const void* at) { emulator::touch(at, false); }
template <class Value>
Value load_result(const Value* from) {
  if (!emulator::current->has_waited) emulator::fail("another kernel's result, without waiting for it");
  return *from;
}
inline void sync_block() { emulator::meet(emulator::current->block->barrier, "a block's barrier"); }

template <class Value>
Value shuffle_down(const Value& value, int distance) {
  static_assert(sizeof(Value) <= emulator::kShuffleBytes, "a larger slot");
  emulator::Thread& me = *emulator::current;
  emulator::Warp& warp = me.block->warps[me.index / kWarp];
  const int lane = me.index % kWarp, buffer = me.shuffles++ % 2;
  std::memcpy(warp.slots[buffer][lane], &value, sizeof(Value));
  emulator::meet(warp.barrier, "a shuffle");
  Value result = value;
  if (lane + distance < kWarp) std::memcpy(&result, warp.slots[buffer][lane + distance], sizeof(Value));
  return result;
}

// Vector accesses must be aligned, as on the device.
inline void check_aligned(const void* at, uintptr_t bytes) {
  if (reinterpret_cast<uintptr_t>(at) % bytes != 0) emulator::fail("an access that is not aligned");
}
template <Reuse, int n>
Words<n> load_words(const void* from) {
  check_aligned(from, sizeof(Words<n>));
  emulator::touch(from, false);
  Words<n> words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}
template <Reuse, class Storage>
Storage load_element(const Storage* from) {
  emulator::touch(from, false);
  return *from;
}
template <int n>
void store_words(void* to, const Words<n>& value) {
  check_aligned(to, sizeof(value));
  emulator::touch(to, true);
  std::memcpy(to, &value, sizeof(value));
}
template <class Storage>
void store_element(Storage* to, Storage value) {
  emulator::touch(to, true);
  *to = value;
}

template <class Value>
void put(Value* slot, const Value& value) {
  emulator::check_shared(slot, sizeof(Value), alignof(Value), true);
  *slot = value;
}
template <class Value>
Value get(const Value* slot) {
  emulator::check_shared(slot, sizeof(Value), alignof(Value), false);
  return *slot;
}
inline float divide_fast(float a, float b) { return a / b; }
inline double divide_fast(double a, double b) { return a / b; }

inline float bits_to_float(uint32_t bits) { return bits_as<float>(bits); }
inline uint32_t float_to_bits(float value) { return bits_as<uint32_t>(value); }
inline double bits_to_double(uint64_t bits) { return bits_as<double>(bits); }
inline uint64_t double_to_bits(double value) { return bits_as<uint64_t>(value); }
inline uint32_t floats_to_halves(float low, float high) {
  return float_to_half(low) | static_cast<uint32_t>(float_to_half(high)) << 16;
}
inline uint32_t floats_to_bfloats(float low, float high) {
  return float_to_bfloat(low) | static_cast<uint32_t>(float_to_bfloat(high)) << 16;
}

}  // namespace bnexport::cuda
