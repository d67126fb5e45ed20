// A device on the host: the primitives of kernels/cuda/device.h, and a launcher that runs kernels.
//
// Every CUDA thread is a fiber of its own. Fibers run until they wait (a barrier, a shuffle, a cluster, a
// count of arrivals), and which one runs next is random, so that a missing barrier shows up as a wrong
// result. Barriers that not all threads reach, and waits for what nobody will signal, end the program
// with a message. Shared memory is a heap block of the size that was asked for, filled with NaN.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

#define BNEXPORT_KERNEL(threads, blocks) void
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
  int shuffles = 0;             // so far; two buffers in turn
  uint64_t cluster_ticket = 0;  // the generation that cluster_arrive waits for
  bool cluster_arrived = false;
};

constexpr int kShuffleBytes = 160;
struct Warp {
  Barrier barrier;
  alignas(16) unsigned char slots[2][kWarp][kShuffleBytes];
};

struct Cluster;
struct Block {
  int64_t index = 0;
  int rank = 0, threads = 0;
  unsigned char* shared = nullptr;
  Barrier barrier;
  Warp* warps = nullptr;
  Cluster* cluster = nullptr;
};

struct Cluster {
  Barrier barrier;
  int size = 1;
  Block** blocks = nullptr;
  bool all_started = false;  // some thread has passed a cluster barrier
};

extern Thread* current;

// Bytes of the 32-byte sectors that launches load and store, each sector once a launch: what memory moves when a
// launch's second read comes from caches. Counted while it is not negative.
extern int64_t traffic;
void touch(const void* at, bool stores);
extern int64_t grid;

void arrive(Barrier& barrier);
void pass(const uint64_t* value, uint64_t unwanted, const char* what);  // waits while *value == unwanted
void wait_for_count(const uint32_t* counter, uint32_t count);
[[noreturn]] void fail(const char* what);

inline void meet(Barrier& barrier, const char* what) {
  const uint64_t generation = barrier.generation;
  arrive(barrier);
  pass(&barrier.generation, generation, what);
}

struct Shape {
  int64_t blocks, threads, shared, cluster;
  bool together;
};
void run(const Shape& shape, uint32_t seed, const std::function<void()>& kernel);

}  // namespace emulator

inline int thread_index() { return emulator::current->index; }
inline int thread_count() { return emulator::current->block->threads; }
inline int block_index() { return static_cast<int>(emulator::current->block->index); }
inline int block_count() { return static_cast<int>(emulator::grid); }
inline unsigned char* shared_memory() { return emulator::current->block->shared; }
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

inline int cluster_size() { return emulator::current->block->cluster->size; }
inline int cluster_rank() { return emulator::current->block->rank; }
inline void cluster_arrive() {
  emulator::Thread& me = *emulator::current;
  if (me.cluster_arrived) emulator::fail("a second cluster_arrive without cluster_wait");
  me.cluster_arrived = true;
  me.cluster_ticket = me.block->cluster->barrier.generation;
  emulator::arrive(me.block->cluster->barrier);
}
inline void cluster_wait() {
  emulator::Thread& me = *emulator::current;
  if (!me.cluster_arrived) emulator::fail("cluster_wait without cluster_arrive");
  me.cluster_arrived = false;
  emulator::pass(&me.block->cluster->barrier.generation, me.cluster_ticket, "a cluster's barrier");
  me.block->cluster->all_started = true;
}
template <class Value>
Value* in_block(Value* shared, int rank) {
  const emulator::Block& mine = *emulator::current->block;
  if (!mine.cluster->all_started) emulator::fail("another block's shared memory before that block surely runs");
  const int64_t offset = reinterpret_cast<unsigned char*>(shared) - mine.shared;
  return reinterpret_cast<Value*>(mine.cluster->blocks[rank]->shared + offset);
}

// Vector accesses must be aligned, as on the device.
inline void check_aligned(const void* at) {
  if (reinterpret_cast<uintptr_t>(at) % 16 != 0) emulator::fail("a 16-byte access that is not aligned");
}
template <Reuse>
Words load_words(const void* from) {
  check_aligned(from);
  emulator::touch(from, false);
  Words words;
  std::memcpy(&words, from, 16);
  return words;
}
template <Reuse, class Storage>
Storage load_element(const Storage* from) {
  emulator::touch(from, false);
  return *from;
}
inline void store_words(void* to, const Words& value, bool) {
  check_aligned(to);
  emulator::touch(to, true);
  std::memcpy(to, &value, 16);
}
template <class Storage>
void store_element(Storage* to, Storage value, bool) {
  emulator::touch(to, true);
  *to = value;
}
inline void prefetch(const void*) {}
inline double load_shared_between_blocks(const double* from) { return *from; }

inline void signal(uint32_t* counter) { ++*counter; }
inline void await(const uint32_t* counter, uint32_t count) { emulator::wait_for_count(counter, count); }

inline int count_bits(uint32_t bits) { return __builtin_popcount(bits); }
inline float divide_fast(float a, float b) { return a / b; }
inline double divide_fast(double a, double b) { return a / b; }

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
inline float bits_to_float(uint32_t bits) { return bits_as<float>(bits); }
inline uint32_t float_to_bits(float value) { return bits_as<uint32_t>(value); }
inline double bits_to_double(uint64_t bits) { return bits_as<double>(bits); }
inline uint64_t double_to_bits(double value) { return bits_as<uint64_t>(value); }
float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);
uint16_t float_to_bfloat(float value);
inline uint32_t floats_to_halves(float low, float high) {
  return float_to_half(low) | static_cast<uint32_t>(float_to_half(high)) << 16;
}
inline uint32_t floats_to_bfloats(float low, float high) {
  return float_to_bfloat(low) | static_cast<uint32_t>(float_to_bfloat(high)) << 16;
}

}  // namespace bnexport::cuda
