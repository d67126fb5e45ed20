// Vectors of the size of a register, and the conversions that compilers do not find by themselves.
//
// AVX-512 has registers of 64 bytes, AVX2 of 32, baseline x86-64 and NEON of 16. A GCC vector of any other size
// lives in memory: each operation loads it from the stack and stores it back, ten times slower. simd.h makes
// vectors of one length for all sets out of these.
//
// Included by translation units that are compiled once per instruction set: everything must have internal
// linkage, or the linker might keep the AVX-512 copy of a shared inline function.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define BNEXPORT_INLINE inline __attribute__((always_inline))
// For what is rare: it must not take registers from the loops around it.
#define BNEXPORT_OUTLINE __attribute__((noinline))

namespace bnexport::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kNativeBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kNativeBytes = 32;
#else
constexpr int64_t kNativeBytes = 16;
#endif

typedef float NativeF __attribute__((vector_size(kNativeBytes)));
typedef double NativeD __attribute__((vector_size(kNativeBytes)));
typedef int32_t NativeI __attribute__((vector_size(kNativeBytes)));
typedef uint32_t NativeU __attribute__((vector_size(kNativeBytes)));
typedef uint16_t NativeH __attribute__((vector_size(kNativeBytes)));

constexpr int64_t kFloats = kNativeBytes / 4;
constexpr int64_t kDoubles = kNativeBytes / 8;

template <class V>
BNEXPORT_INLINE V load_bytes(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

// Past the last level of cache a plain store first reads the line it overwrites; a streaming store does not.
// The caller asks for it only where that pays, and gives addresses that are aligned to the vector.
template <bool stream, class V>
BNEXPORT_INLINE void store_bytes(void* to, V value) {
#if defined(__AVX512F__)
  if constexpr (stream && sizeof(V) == 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value);
    return;
  }
#endif
#if defined(__AVX2__)
  if constexpr (stream && sizeof(V) == 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value);
    return;
  }
#endif
#if defined(__x86_64__)
  if constexpr (stream && sizeof(V) == 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)value);
    return;
  }
#endif
  std::memcpy(to, &value, sizeof(V));
}

// Streaming stores become visible to other threads in order only after this.
BNEXPORT_INLINE void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

BNEXPORT_INLINE NativeF square_root(NativeF v) {
#if defined(__AVX512F__)
  return (NativeF)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
  return (NativeF)_mm256_sqrt_ps((__m256)v);
#elif defined(__x86_64__)
  return (NativeF)_mm_sqrt_ps((__m128)v);
#elif defined(__aarch64__)
  return (NativeF)vsqrtq_f32((float32x4_t)v);
#else
  for (int64_t i = 0; i < kFloats; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
#endif
}

// The first `count` lanes from memory, zeros behind them, and to memory.
BNEXPORT_INLINE NativeF load_part(const float* from, int64_t count) {
  float buffer[kFloats] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = from[i];
  return load_bytes<NativeF>(buffer);
}
BNEXPORT_INLINE void store_part(float* to, NativeF value, int64_t count) {
  float buffer[kFloats];
  store_bytes<false>(buffer, value);
  for (int64_t i = 0; i < count; ++i) to[i] = buffer[i];
}

// Whether any lane of a comparison's result holds.
template <class Mask>
BNEXPORT_INLINE bool any(Mask mask) {
  static_assert(sizeof(Mask) == kNativeBytes, "one register");
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#elif defined(__x86_64__)
  return _mm_movemask_epi8((__m128i)mask) != 0;
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
  uint64_t parts[sizeof(Mask) / 8], all = 0;
  std::memcpy(parts, &mask, sizeof(Mask));
  for (const uint64_t part : parts) all |= part;
  return all != 0;
#endif
}

// The lower and the upper half of the lanes in double.
BNEXPORT_INLINE NativeD doubles_of_lower(NativeF v) {
#if defined(__AVX512F__)
  return (NativeD)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
#elif defined(__AVX2__)
  return (NativeD)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
#elif defined(__x86_64__)
  return (NativeD)_mm_cvtps_pd((__m128)v);
#elif defined(__aarch64__)
  return (NativeD)vcvt_f64_f32(vget_low_f32((float32x4_t)v));
#else
  return NativeD{v[0], v[1]};
#endif
}

BNEXPORT_INLINE NativeD doubles_of_upper(NativeF v) {
#if defined(__AVX512F__)
  return (NativeD)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(__AVX2__)
  return (NativeD)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#elif defined(__x86_64__)
  return (NativeD)_mm_cvtps_pd(_mm_movehl_ps((__m128)v, (__m128)v));
#elif defined(__aarch64__)
  return (NativeD)vcvt_high_f64_f32((float32x4_t)v);
#else
  return NativeD{v[2], v[3]};
#endif
}

// kDoubles values from memory, as doubles.
BNEXPORT_INLINE NativeD load_doubles(const double* from) { return load_bytes<NativeD>(from); }
BNEXPORT_INLINE NativeD load_doubles(const float* from) {
#if defined(__AVX512F__)
  return (NativeD)_mm512_cvtps_pd(_mm256_loadu_ps(from));
#elif defined(__AVX2__)
  return (NativeD)_mm256_cvtps_pd(_mm_loadu_ps(from));
#elif defined(__x86_64__)
  return (NativeD)_mm_cvtps_pd(_mm_castpd_ps(_mm_load_sd(reinterpret_cast<const double*>(from))));
#elif defined(__aarch64__)
  return (NativeD)vcvt_f64_f32(vld1_f32(from));
#else
  return NativeD{from[0], from[1]};
#endif
}

// kFloats values of 16 bits, zero-extended to 32 bits.
BNEXPORT_INLINE NativeI load_halves(const void* from) {
#if defined(__AVX512F__)
  return (NativeI)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (NativeI)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#elif defined(__x86_64__)
  return (NativeI)_mm_unpacklo_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(from)), _mm_setzero_si128());
#elif defined(__aarch64__)
  return (NativeI)vmovl_u16(vld1_u16(static_cast<const uint16_t*>(from)));
#else
  uint16_t halves[kFloats];
  std::memcpy(halves, from, sizeof(halves));
  return NativeI{halves[0], halves[1], halves[2], halves[3]};
#endif
}

// The upper halves of 32-bit lanes, two registers in one: what is left of a bfloat16 after rounding.
#if !defined(__AVX512F__)
BNEXPORT_INLINE NativeH upper_halves(NativeI a, NativeI b) {
#if defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32((__m256i)a, 16), _mm256_srli_epi32((__m256i)b, 16));
  return (NativeH)_mm256_permute4x64_epi64(packed, 0xd8);
#elif defined(__x86_64__)
  // Shifted as signed numbers, they pass the saturation unchanged.
  return (NativeH)_mm_packs_epi32(_mm_srai_epi32((__m128i)a, 16), _mm_srai_epi32((__m128i)b, 16));
#elif defined(__aarch64__)
  return (NativeH)vshrn_high_n_u32(vshrn_n_u32((uint32x4_t)a, 16), (uint32x4_t)b, 16);
#else
  NativeH result;
  for (int64_t i = 0; i < kFloats; ++i) {
    result[i] = static_cast<uint16_t>(static_cast<uint32_t>(a[i]) >> 16);
    result[i + kFloats] = static_cast<uint16_t>(static_cast<uint32_t>(b[i]) >> 16);
  }
  return result;
#endif
}
#endif

// Whether instructions convert float16.
#if defined(__F16C__) || defined(__aarch64__)
constexpr bool kHasHalves = true;
#else
constexpr bool kHasHalves = false;
#endif

// float16 -> float32; exact, subnormals included, whatever the rounding and flush-to-zero modes are.
BNEXPORT_INLINE NativeF load_float16(const void* from) {
#if defined(__AVX512F__)
  return (NativeF)_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (NativeF)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#elif defined(__aarch64__)
  return (NativeF)vcvt_f32_f16(vld1_f16(static_cast<const float16_t*>(from)));
#else
  const NativeI half = load_halves(from), magnitude = half & 0x7fff, moved = magnitude << 13;
  const NativeI one = NativeI{} + (113 << 23);
  const auto subnormal = (NativeI)((NativeF)(moved + one) - (NativeF)one);
  NativeI result = magnitude < 0x400 ? subnormal : moved + (112 << 23);
  result += magnitude > 0x7bff ? NativeI{} + (112 << 23) : NativeI{};
  return (NativeF)(result | ((half ^ magnitude) << 16));
#endif
}

// float32 -> float16, to nearest, ties to even; overflow to infinity, NaN stays NaN.
#if !defined(__F16C__) && !defined(__aarch64__)
BNEXPORT_INLINE NativeI float16_bits(NativeF value) {
  const NativeI magnitude = (NativeI)value & 0x7fffffff;
  const NativeI odd = (magnitude >> 13) & 1;
  const NativeI normal = (magnitude + 0xfff + odd - (112 << 23)) >> 13;
  const NativeI half_bits = NativeI{} + (126 << 23);  // 0.5: adding it leaves the subnormal's bits
  const NativeI subnormal = (NativeI)((NativeF)magnitude + (NativeF)half_bits) - half_bits;
  const NativeI infinity = NativeI{} + 0x7c00, not_a_number = NativeI{} + 0x7e00;
  NativeI result = magnitude < 0x38800000 ? subnormal : normal;
  result = magnitude >= 0x47800000 ? infinity : result;
  return magnitude > 0x7f800000 ? not_a_number : result;
}
#endif

#if defined(__AVX512F__)
template <bool stream>
BNEXPORT_INLINE void store_float16(void* to, NativeF value) {
  store_bytes<stream>(to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
// Two registers of floats, one of halves.
template <bool stream>
BNEXPORT_INLINE void store_float16(void* to, NativeF a, NativeF b) {
#if defined(__F16C__)
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  store_bytes<stream>(to, _mm256_cvtps_ph((__m256)a, kMode));
  store_bytes<stream>(static_cast<char*>(to) + 16, _mm256_cvtps_ph((__m256)b, kMode));
#elif defined(__aarch64__)
  store_bytes<stream>(to, vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)a), (float32x4_t)b));
#else
  // Magnitudes fit 15 bits; the signs are the upper halves' own.
  const NativeH signs = upper_halves((NativeI)a, (NativeI)b) & 0x8000;
  store_bytes<stream>(to, upper_halves(float16_bits(a) << 16, float16_bits(b) << 16) | signs);
#endif
}
#endif

BNEXPORT_INLINE NativeF load_bfloat16(const void* from) {
#if defined(__aarch64__)
  return (NativeF)vshll_n_u16(vld1_u16(static_cast<const uint16_t*>(from)), 16);
#elif defined(__x86_64__) && !defined(__AVX2__)
  return (NativeF)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64(static_cast<const __m128i*>(from)));
#else
  return (NativeF)(load_halves(from) << 16);
#endif
}

// float32 -> bfloat16, to nearest, ties to even: add half an ulp less one, and one more where the kept part is
// odd. What carries into the sign must not be a NaN: the lower half of one must be zero, as it is in results of
// arithmetic with bfloat16 values and with coefficients that bands.h has seen to. A test of each value for NaN
// would cost as much as the rounding.
#if defined(__AVX512F__)
template <bool stream>
BNEXPORT_INLINE void store_bfloat16(void* to, NativeF value) {
  const auto all = (__m512i)value;
  const __mmask16 odd = _mm512_test_epi32_mask(all, _mm512_set1_epi32(0x10000));
  __m512i rounded = _mm512_add_epi32(all, _mm512_set1_epi32(0x7fff));
  rounded = _mm512_mask_add_epi32(rounded, odd, rounded, _mm512_set1_epi32(1));
  typedef uint16_t Halves __attribute__((vector_size(32)));
  const __m512i upper =
      _mm512_castsi256_si512((__m256i)Halves{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
  store_bytes<stream>(to, _mm512_castsi512_si256(_mm512_permutexvar_epi16(upper, rounded)));
}
#else
BNEXPORT_INLINE NativeI rounded_to_bfloat16(NativeF value) {
  const auto all = (NativeU)value;
  return (NativeI)(all + ((all >> 16) & 1) + 0x7fff);
}

// Two registers of floats, one of halves.
template <bool stream>
BNEXPORT_INLINE void store_bfloat16(void* to, NativeF a, NativeF b) {
  store_bytes<stream>(to, upper_halves(rounded_to_bfloat16(a), rounded_to_bfloat16(b)));
}
#endif

}  // namespace
}  // namespace bnexport::cpu
