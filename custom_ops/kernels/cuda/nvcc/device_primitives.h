// The primitives of device.h in CUDA.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define BNEXPORT_KERNEL __global__ void __launch_bounds__(kThreads, kBlocks)
#define BNEXPORT_DEVICE __device__ __forceinline__
// Arguments stay in constant memory: a reference to them makes no copy.
#define BNEXPORT_ARGUMENTS const __grid_constant__

namespace bnexport::cuda {

BNEXPORT_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
BNEXPORT_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
BNEXPORT_DEVICE int block_count() { return static_cast<int>(gridDim.x); }

// Dynamic shared memory, 16-byte aligned.
BNEXPORT_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char bnexport_shared[];
  return bnexport_shared;
}

BNEXPORT_DEVICE void sync_block() { __syncthreads(); }

// The value of the lane `distance` above, one's own where there is none. All lanes of the warp call it.
template <class Value>
BNEXPORT_DEVICE Value shuffle_down(const Value& value, int distance) {
  static_assert(sizeof(Value) % 4 == 0, "whole words");
  constexpr int kWords = sizeof(Value) / 4;
  union Bits {
    Value value;
    uint32_t word[kWords];
    BNEXPORT_DEVICE explicit Bits(const Value& from) : value(from) {}
  } bits(value);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    bits.word[i] = __shfl_down_sync(0xffffffffu, bits.word[i], static_cast<unsigned>(distance));
  }
  return bits.value;
}

// A launch that overlaps the one before it on the stream (Hopper and newer; the launch asks for it). start_next(): the
// next one's blocks may take the places that are free. wait_for_previous(): all that it has written can be read.
BNEXPORT_DEVICE void start_next() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
BNEXPORT_DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Global memory. Kernels may write to what they read (y == x), so loads do not go the read-only way;
// nothing is read twice from one multiprocessor's first level, so they leave it out.
template <Reuse reuse, int n>
BNEXPORT_DEVICE Words<n> load_words(const void* from) {
  if constexpr (n == 4) {
    const auto* at = static_cast<const uint4*>(from);
    const uint4 v = reuse == Reuse::kNever ? __ldcs(at) : __ldcg(at);
    return {{v.x, v.y, v.z, v.w}};
  } else {
    const auto* at = static_cast<const uint2*>(from);
    const uint2 v = reuse == Reuse::kNever ? __ldcs(at) : __ldcg(at);
    return {{v.x, v.y}};
  }
}
template <Reuse reuse, class Storage>
BNEXPORT_DEVICE Storage load_element(const Storage* from) {
  return reuse == Reuse::kNever ? __ldcs(from) : __ldcg(from);
}
// What is stored is the first to leave L2: what the second pass still has to read shall stay.
BNEXPORT_DEVICE void store_words(void* to, const Words<4>& value) {
  __stcs(static_cast<uint4*>(to), make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]));
}
BNEXPORT_DEVICE void store_words(void* to, const Words<2>& value) {
  __stcs(static_cast<uint2*>(to), make_uint2(value.word[0], value.word[1]));
}
template <class Storage>
BNEXPORT_DEVICE void store_element(Storage* to, Storage value) {
  __stcs(to, value);
}

// Brings a value's line into L2. Nothing waits for it.
BNEXPORT_DEVICE void fetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// What the kernel before this one wrote.
template <class Value>
BNEXPORT_DEVICE Value load_result(const Value* from) {
  return *from;
}

// Values that threads of a block exchange through shared memory.
template <class Value>
BNEXPORT_DEVICE void put(Value* slot, const Value& value) {
  *slot = value;
}
template <class Value>
BNEXPORT_DEVICE Value get(const Value* slot) {
  return *slot;
}

// Within 2 ulp; for shares of counts.
BNEXPORT_DEVICE float divide_fast(float a, float b) { return __fdividef(a, b); }
BNEXPORT_DEVICE double divide_fast(double a, double b) { return a / b; }

BNEXPORT_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
BNEXPORT_DEVICE uint32_t float_to_bits(float value) { return __float_as_uint(value); }
BNEXPORT_DEVICE double bits_to_double(uint64_t bits) { return __longlong_as_double(static_cast<long long>(bits)); }
BNEXPORT_DEVICE uint64_t double_to_bits(double value) { return static_cast<uint64_t>(__double_as_longlong(value)); }
BNEXPORT_DEVICE float half_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
// Two values, the first in the low half; round to nearest even.
BNEXPORT_DEVICE uint32_t floats_to_halves(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return static_cast<uint32_t>(__half_as_ushort(pair.x)) | static_cast<uint32_t>(__half_as_ushort(pair.y)) << 16;
}
BNEXPORT_DEVICE uint32_t floats_to_bfloats(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return static_cast<uint32_t>(__bfloat16_as_ushort(pair.x)) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y))
                                                                   << 16;
}

}  // namespace bnexport::cuda
