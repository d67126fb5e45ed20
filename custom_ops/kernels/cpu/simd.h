// 64-byte vectors in GCC's vector extension, and loads and stores of the four element types.
//
// One source serves every instruction set: the compiler splits a 64-byte vector into what the target
// has (one zmm, two ymm, four xmm or NEON registers), so the number of lanes - and with it the order
// of every sum - is the same everywhere. Intrinsics appear only for conversions and streaming stores,
// which compilers do not find by themselves.
//
// Included by translation units that are compiled once per instruction set: everything must have
// internal linkage, or the linker might keep the AVX-512 copy of a shared inline function.
#ifndef BNEXPORT_KERNELS_CPU_SIMD_H
#define BNEXPORT_KERNELS_CPU_SIMD_H

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define BNEXPORT_INLINE inline __attribute__((always_inline))

namespace bnexport::cpu {
namespace {

typedef float VectorF __attribute__((vector_size(64)));
typedef double VectorD __attribute__((vector_size(64)));
typedef int32_t VectorI __attribute__((vector_size(64)));
typedef uint32_t VectorU __attribute__((vector_size(64)));
typedef int64_t VectorL __attribute__((vector_size(64)));
typedef uint16_t VectorH __attribute__((vector_size(32)));
typedef float HalfF __attribute__((vector_size(32)));

template <class To, class From>
BNEXPORT_INLINE To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// 16-bit lanes to 32-bit lanes and back. The intrinsics are what __builtin_convertvector should become;
// GCC 12 makes it up from shuffles or single lanes.
BNEXPORT_INLINE VectorI widen(VectorH value) {
#if defined(__AVX512F__)
  return (VectorI)_mm512_cvtepu16_epi32((__m256i)value);
#elif defined(__AVX2__)
  const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)value));
  const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)value, 1));
  VectorI result;
  std::memcpy(&result, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&result) + 32, &high, 32);
  return result;
#else
  return __builtin_convertvector(value, VectorI);
#endif
}

// Lanes must be below 2^16.
BNEXPORT_INLINE VectorH narrow(VectorI value) {
#if defined(__AVX512F__)
  return (VectorH)_mm512_cvtepi32_epi16((__m512i)value);
#elif defined(__AVX2__)
  __m256i low, high;
  std::memcpy(&low, &value, 32);
  std::memcpy(&high, reinterpret_cast<const char*>(&value) + 32, 32);
  return (VectorH)_mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
#else
  return __builtin_convertvector(value, VectorH);
#endif
}

// float16 -> float32 in integer arithmetic; exact, subnormals included, whatever the rounding and
// flush-to-zero modes are.
BNEXPORT_INLINE VectorF float_from_half(VectorH half) {
#if defined(__AVX512F__)
  return (VectorF)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__)
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)half));
  const __m256 high = _mm256_cvtph_ps(_mm256_extractf128_si256((__m256i)half, 1));
  VectorF result;
  std::memcpy(&result, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&result) + 32, &high, 32);
  return result;
#else
  const VectorI wide = widen(half);
  const VectorI magnitude = wide & 0x7fff;
  const VectorI moved = magnitude << 13;
  const VectorI normal = moved + (112 << 23);
  const VectorI special = moved + (224 << 23);
  const VectorI one = VectorI{} + (113 << 23);
  const auto subnormal = bits<VectorI>(bits<VectorF>(moved + (113 << 23)) - bits<VectorF>(one));
  VectorI result = magnitude < 0x400 ? subnormal : normal;
  result = magnitude >= 0x7c00 ? special : result;
  return bits<VectorF>(result | ((wide & 0x8000) << 16));
#endif
}

// float32 -> float16, to nearest, ties to even; overflow to infinity, NaN stays NaN.
BNEXPORT_INLINE VectorH half_from_float(VectorF value) {
#if defined(__AVX512F__)
  return (VectorH)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  __m256 low, high;
  std::memcpy(&low, &value, 32);
  std::memcpy(&high, reinterpret_cast<const char*>(&value) + 32, 32);
  const __m128i a = _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m128i b = _mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (VectorH)_mm256_insertf128_si256(_mm256_castsi128_si256(a), b, 1);
#else
  const auto all = bits<VectorI>(value);
  const VectorI sign = (all >> 16) & 0x8000;
  const VectorI magnitude = all & 0x7fffffff;
  const VectorI odd = (magnitude >> 13) & 1;
  const VectorI normal = (magnitude + 0xfff + odd - (112 << 23)) >> 13;
  const VectorI half_bits = VectorI{} + (126 << 23);  // 0.5: adding it leaves the subnormal's bits
  const VectorI subnormal = bits<VectorI>(bits<VectorF>(magnitude) + bits<VectorF>(half_bits)) - half_bits;
  const VectorI not_a_number = VectorI{} + 0x7e00;
  const VectorI infinity = VectorI{} + 0x7c00;
  VectorI result = magnitude < 0x38800000 ? subnormal : normal;
  result = magnitude >= 0x47800000 ? infinity : result;
  result = magnitude > 0x7f800000 ? not_a_number : result;
  return narrow(result | sign);
#endif
}

BNEXPORT_INLINE VectorF float_from_bfloat(VectorH value) { return bits<VectorF>(widen(value) << 16); }

// float32 -> bfloat16, to nearest, ties to even: add half an ulp less one, and one more where the kept
// part is odd. NaN is kept out of the carry, and quiet.
BNEXPORT_INLINE VectorH bfloat_from_float(VectorF value) {
#if defined(__AVX512F__)
  // Six instructions a vector; with half the bytes of float32 there is little time for more.
  const auto all = (__m512i)value;
  const __mmask16 odd = _mm512_test_epi32_mask(all, _mm512_set1_epi32(0x10000));
  const __mmask16 not_a_number = _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_UNORD_Q);
  __m512i rounded = _mm512_add_epi32(all, _mm512_set1_epi32(0x7fff));
  rounded = _mm512_mask_add_epi32(rounded, odd, rounded, _mm512_set1_epi32(1));
  rounded = _mm512_mask_or_epi32(rounded, not_a_number, all, _mm512_set1_epi32(0x400000));
  const __m512i upper_halves =
      _mm512_castsi256_si512((__m256i)VectorH{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
  return (VectorH)_mm512_castsi512_si256(_mm512_permutexvar_epi16(upper_halves, rounded));
#else
  const auto all = bits<VectorU>(value);
  const VectorU rounded = (all + 0x7fff + ((all >> 16) & 1)) >> 16;
  const VectorU quiet = (all >> 16) | 0x40;
  return narrow(bits<VectorI>(value == value ? rounded : quiet));
#endif
}

template <class V>
BNEXPORT_INLINE V load_bytes(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

// Past the last level of cache a plain store first reads the line it overwrites; a streaming store
// does not. The caller asks for it only where that pays, and gives aligned addresses.
template <bool stream, class V>
BNEXPORT_INLINE void store_bytes(void* to, const V& value) {
#if defined(__AVX512F__)
  if constexpr (stream && sizeof(V) == 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits<__m512i>(value));
    return;
  }
#endif
#if defined(__AVX__)
  if constexpr (stream) {
    for (unsigned part = 0; part < sizeof(V); part += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<char*>(to) + part),
                          load_bytes<__m256i>(reinterpret_cast<const char*>(&value) + part));
    }
    return;
  }
#endif
  std::memcpy(to, &value, sizeof(V));
}

// Streaming stores become visible to other threads in order only after this.
BNEXPORT_INLINE void stream_fence() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// An element type: `Storage` in memory, `Vector` of `Compute` lanes in registers.
struct Float32 {
  using Storage = float;
  using Compute = float;
  using Vector = VectorF;
  static BNEXPORT_INLINE Vector load(const Storage* from) { return load_bytes<Vector>(from); }
  template <bool stream>
  static BNEXPORT_INLINE void store(Storage* to, Vector value) {
    store_bytes<stream>(to, value);
  }
};

struct Float64 {
  using Storage = double;
  using Compute = double;
  using Vector = VectorD;
  static BNEXPORT_INLINE Vector load(const Storage* from) { return load_bytes<Vector>(from); }
  template <bool stream>
  static BNEXPORT_INLINE void store(Storage* to, Vector value) {
    store_bytes<stream>(to, value);
  }
};

struct Float16 {
  using Storage = uint16_t;
  using Compute = float;
  using Vector = VectorF;
  static BNEXPORT_INLINE Vector load(const Storage* from) { return float_from_half(load_bytes<VectorH>(from)); }
  template <bool stream>
  static BNEXPORT_INLINE void store(Storage* to, Vector value) {
    store_bytes<stream>(to, half_from_float(value));
  }
};

struct BFloat16 {
  using Storage = uint16_t;
  using Compute = float;
  using Vector = VectorF;
  static BNEXPORT_INLINE Vector load(const Storage* from) { return float_from_bfloat(load_bytes<VectorH>(from)); }
  template <bool stream>
  static BNEXPORT_INLINE void store(Storage* to, Vector value) {
    store_bytes<stream>(to, bfloat_from_float(value));
  }
};

template <class T>
constexpr int64_t kLanes = sizeof(typename T::Vector) / sizeof(typename T::Compute);

// The first `count` lanes from memory, zeros behind them.
template <class T>
BNEXPORT_INLINE typename T::Vector load_part(const typename T::Storage* from, int64_t count) {
  typename T::Storage buffer[kLanes<T>] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = from[i];
  return T::load(buffer);
}

template <class T>
BNEXPORT_INLINE void store_part(typename T::Storage* to, typename T::Vector value, int64_t count) {
  typename T::Storage buffer[kLanes<T>];
  T::template store<false>(buffer, value);
  for (int64_t i = 0; i < count; ++i) to[i] = buffer[i];
}

BNEXPORT_INLINE VectorI lane_numbers(VectorF) { return VectorI{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
BNEXPORT_INLINE VectorL lane_numbers(VectorD) { return VectorL{0, 1, 2, 3, 4, 5, 6, 7}; }

// Keeps the last `count` lanes, zeros the others (whatever they hold, NaN included).
template <class V>
BNEXPORT_INLINE V keep_last(V value, int64_t count) {
  const auto lanes = lane_numbers(value);
  using Lane = std::remove_reference_t<decltype(lanes[0])>;
  constexpr int64_t total = sizeof(V) / sizeof(value[0]);
  return lanes >= static_cast<Lane>(total - count) ? value : V{};
}

BNEXPORT_INLINE VectorD lower(VectorF v) { return __builtin_convertvector(load_bytes<HalfF>(&v), VectorD); }
BNEXPORT_INLINE VectorD upper(VectorF v) {
  return __builtin_convertvector(load_bytes<HalfF>(reinterpret_cast<const char*>(&v) + 32), VectorD);
}

// Sums of the lanes, in a fixed order, in double.
BNEXPORT_INLINE double sum_lanes(VectorD v) {
  return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}
BNEXPORT_INLINE double sum_lanes(VectorF v) { return sum_lanes(lower(v) + upper(v)); }

}  // namespace
}  // namespace bnexport::cpu

#endif  // BNEXPORT_KERNELS_CPU_SIMD_H
