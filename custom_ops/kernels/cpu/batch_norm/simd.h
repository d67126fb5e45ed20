// Logical vectors of one length for every instruction set, and loads and stores of the four element types.
//
// A vector of 16 floats or 8 doubles is an aggregate of native ones: one with AVX-512, two with AVX2, four with
// SSE2 and NEON. The number of lanes, and with it the order of every sum, is the same everywhere. The aggregate
// is a tree of halves and not an array: compilers keep the members of a struct in registers, but an array that
// is indexed in a loop only if they unroll it early enough.
//
// Loops that sum across lanes work on whole vectors. Loops that compute each value alone work on the smallest
// piece that an element type can store, so that few registers are in flight.
#pragma once

#include <type_traits>

#include "../native.h"

namespace bnexport::cpu {
namespace {

template <class Native, int64_t count>
struct Pack {
  using Half = Pack<Native, count / 2>;
  static constexpr int64_t kLanes = 2 * Half::kLanes;
  Half low, high;
};
template <class Native>
struct Pack<Native, 1> {
  static constexpr int64_t kLanes = std::is_same_v<Native, NativeD> ? kDoubles : kFloats;
  Native value;
};

constexpr int64_t kParts = 64 / kNativeBytes;
using VectorF = Pack<NativeF, kParts>;
using VectorD = Pack<NativeD, kParts>;

#define BNEXPORT_OPERATOR(op)                                                                       \
  template <class Native>                                                                           \
  BNEXPORT_INLINE Pack<Native, 1> operator op(const Pack<Native, 1>& a, const Pack<Native, 1>& b) { \
    return {a.value op b.value};                                                                    \
  }                                                                                                 \
  template <class Native, int64_t n>                                                                \
  BNEXPORT_INLINE Pack<Native, n> operator op(const Pack<Native, n>& a, const Pack<Native, n>& b) { \
    return {a.low op b.low, a.high op b.high};                                                      \
  }
BNEXPORT_OPERATOR(+)
BNEXPORT_OPERATOR(-)
BNEXPORT_OPERATOR(*)
#undef BNEXPORT_OPERATOR

template <class Native, int64_t n>
BNEXPORT_INLINE void operator+=(Pack<Native, n>& a, const Pack<Native, n>& b) {
  a = a + b;
}

// The same number in all lanes.
template <class V, class Number>
BNEXPORT_INLINE V fill(Number number) {
  if constexpr (sizeof(V) == kNativeBytes) {
    return {decltype(V::value){} + number};
  } else {
    const auto half = fill<typename V::Half>(number);
    return {half, half};
  }
}

// An element type: `Storage` in memory, `Compute` in registers. `Vector` is the logical vector, `Piece` the least
// that is stored at a time. kUnrolls: conversions are so short that loops gain from several pieces in a row.
struct Float32 {
  static constexpr bool kUnrolls = true;
  using Storage = float;
  using Compute = float;
  using Vector = VectorF;
  using Piece = Pack<NativeF, 1>;
  static BNEXPORT_INLINE NativeF load(const Storage* from) { return load_bytes<NativeF>(from); }
  template <bool stream>
  static BNEXPORT_INLINE void store(Storage* to, const Piece& from) {
    store_bytes<stream>(to, from.value);
  }
};

struct Float64 {
  static constexpr bool kUnrolls = true;
  using Storage = double;
  using Compute = double;
  using Vector = VectorD;
  using Piece = Pack<NativeD, 1>;
  static BNEXPORT_INLINE NativeD load(const Storage* from) { return load_bytes<NativeD>(from); }
  template <bool stream>
  static BNEXPORT_INLINE void store(Storage* to, const Piece& from) {
    store_bytes<stream>(to, from.value);
  }
};

// Types of 16 bits: two registers of floats fill one of halves. With AVX-512 half a register is stored, so that a
// piece is a whole vector there as well.
using HalfPiece = Pack<NativeF, kParts == 1 ? 1 : 2>;

struct Float16 {
  static constexpr bool kUnrolls = kHasHalves;
  using Storage = uint16_t;
  using Compute = float;
  using Vector = VectorF;
  using Piece = HalfPiece;
  static BNEXPORT_INLINE NativeF load(const Storage* from) { return load_float16(from); }
  template <bool stream, class P>
  static BNEXPORT_INLINE void store(Storage* to, const P& from) {
    if constexpr (sizeof(P) == kNativeBytes) {
      store_float16<stream>(to, from.value);
    } else {
      store_float16<stream>(to, from.low.value, from.high.value);
    }
  }
};

struct BFloat16 {
  static constexpr bool kUnrolls = kHasHalves;
  using Storage = uint16_t;
  using Compute = float;
  using Vector = VectorF;
  using Piece = HalfPiece;
  static BNEXPORT_INLINE NativeF load(const Storage* from) { return load_bfloat16(from); }
  template <bool stream, class P>
  static BNEXPORT_INLINE void store(Storage* to, const P& from) {
    if constexpr (sizeof(P) == kNativeBytes) {
      store_bfloat16<stream>(to, from.value);
    } else {
      store_bfloat16<stream>(to, from.low.value, from.high.value);
    }
  }
};

template <class T>
constexpr int64_t kLanes = T::Vector::kLanes;
template <class T>
constexpr int64_t kPiece = T::Piece::kLanes;

// V::kLanes values from memory.
template <class T, class V>
BNEXPORT_INLINE V load(const typename T::Storage* from) {
  if constexpr (sizeof(V) == kNativeBytes) {
    return {T::load(from)};
  } else {
    return {load<T, typename V::Half>(from), load<T, typename V::Half>(from + V::kLanes / 2)};
  }
}

// V: a piece, or several.
template <class T, bool stream, class V>
BNEXPORT_INLINE void store(typename T::Storage* to, const V& from) {
  if constexpr (std::is_same_v<V, typename T::Piece>) {
    T::template store<stream>(to, from);
  } else {
    store<T, stream>(to, from.low);
    store<T, stream>(to + V::kLanes / 2, from.high);
  }
}

// The first of the values at `from`, of which there is a native vector.
template <class T>
BNEXPORT_INLINE typename T::Compute first_value(const typename T::Storage* from) {
  return T::load(from)[0];
}

// 16 lanes unset, 16 set: from entry `count` on, the last `count` of a vector's lanes are set.
alignas(64) constexpr int32_t kLastLanes[32] = {0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,
                                                -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};

// Keeps the last `count` of a vector's lanes and zeros the others, whatever they hold, NaN included. `v` holds the
// vector's lanes from `first` on.
template <class V>
BNEXPORT_INLINE V keep_last(const V& v, int64_t count, int64_t first = 0) {
  if constexpr (sizeof(V) == kNativeBytes) {
    using Native = decltype(V::value);
    constexpr int64_t kEntries = kNativeBytes / 4 / V::kLanes;  // of the table for a lane
    return {(Native)((NativeI)v.value & load_bytes<NativeI>(kLastLanes + kEntries * (count + first)))};
  } else {
    return {keep_last(v.low, count, first), keep_last(v.high, count, first + V::kLanes / 2)};
  }
}

// Lanes of b where the last `count` of `total` lanes are, else of a.
template <class V>
BNEXPORT_INLINE V blend_last(const V& a, const V& b, int64_t count, int64_t total = V::kLanes, int64_t first = 0) {
  if constexpr (sizeof(V) == kNativeBytes) {
    using Native = decltype(V::value);
    constexpr int64_t kEntries = kNativeBytes / 4 / V::kLanes;
    const auto mask = load_bytes<NativeI>(kLastLanes + 16 - kEntries * (total - count - first));
    return {(Native)(mask < 0 ? (NativeI)b.value : (NativeI)a.value)};
  } else {
    return {blend_last(a.low, b.low, count, total, first),
            blend_last(a.high, b.high, count, total, first + V::kLanes / 2)};
  }
}

template <class V>
BNEXPORT_INLINE V not_negative(const V& v) {
  if constexpr (sizeof(V) == kNativeBytes) {
    return {v.value < 0 ? decltype(v.value){} : v.value};
  } else {
    return {not_negative(v.low), not_negative(v.high)};
  }
}

// Lanes of floats as doubles: twice as many registers.
BNEXPORT_INLINE Pack<NativeD, 2> doubles(const Pack<NativeF, 1>& v) {
  return {{doubles_of_lower(v.value)}, {doubles_of_upper(v.value)}};
}
BNEXPORT_INLINE Pack<NativeD, 1> doubles(const Pack<NativeD, 1>& v) { return v; }
template <int64_t n>
BNEXPORT_INLINE Pack<NativeD, 2 * n> doubles(const Pack<NativeF, n>& v) {
  return {doubles(v.low), doubles(v.high)};
}

// The lanes i and i + 8 of a vector, added in double.
BNEXPORT_INLINE VectorD folded(const VectorF& v) {
  const auto all = doubles(v);
  return all.low + all.high;
}

// ((v0 + v4) + (v1 + v5)) + ((v2 + v6) + (v3 + v7))
BNEXPORT_INLINE double sum_lanes(const VectorD& v) {
  double lanes[8];
  static_assert(sizeof(lanes) == sizeof(v), "eight lanes");
  std::memcpy(lanes, &v, sizeof(v));
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}
BNEXPORT_INLINE double sum_lanes(const VectorF& v) { return sum_lanes(folded(v)); }

}  // namespace
}  // namespace bnexport::cpu
