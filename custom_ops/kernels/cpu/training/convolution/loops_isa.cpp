// The inner loops of convolutions for one instruction set (../../processor.h).
#include <cstring>

#include "../../processor.h"
#include "loops.h"

namespace bnexport::cpu {
namespace {

// Tiles of 8 x 3 vectors fill 24 of 32 registers with AVX-512, of 6 x 3 with NEON (8 spill), of 4 x 3 twelve of 16.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kRows = 8;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8, kRows = 4;
#elif defined(__aarch64__)
constexpr int64_t kLanes = 4, kRows = 6;
#else
constexpr int64_t kLanes = 4, kRows = 4;
#endif
constexpr int64_t kShortRows = kRows / 2;
typedef float Vector __attribute__((vector_size(4 * kLanes)));

inline __attribute__((always_inline)) Vector load(const float* from) {
  Vector v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
inline __attribute__((always_inline)) void store(float* to, Vector v) { std::memcpy(to, &v, sizeof(v)); }

template <int64_t kVectors, int64_t kTileRows>
void tile(const float* const* a, const Walk& walk, const float* b, float* c) {
  Vector sums[kTileRows][kVectors] = {};
  const float* row[kTileRows];
  for (int64_t r = 0; r < kTileRows; ++r) row[r] = a[r];
  const int64_t back = walk.jump - walk.middle * walk.pitch;
  for (int64_t o = 0; o < walk.outer; ++o) {
    for (int64_t m = 0; m < walk.middle; ++m) {
      for (int64_t i = 0; i < walk.inner; ++i) {
        Vector values[kVectors];
#pragma GCC unroll 4
        for (int64_t v = 0; v < kVectors; ++v) values[v] = load(b + v * kLanes);
        b += kVectors * kLanes;
#pragma GCC unroll 8
        for (int64_t r = 0; r < kTileRows; ++r) {
          const float one = row[r][i];
#pragma GCC unroll 4
          for (int64_t v = 0; v < kVectors; ++v) sums[r][v] += one * values[v];
        }
      }
#pragma GCC unroll 8
      for (const float*& at : row) at += walk.pitch;
    }
    b += walk.skipped;
#pragma GCC unroll 8
    for (const float*& at : row) at += back;
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      float* at = c + (r * kVectors + v) * kLanes;
      store(at, load(at) + sums[r][v]);
    }
  }
}

void pack(const float* source, const int64_t* offsets, int64_t count, const Run* runs, int64_t run_count, int64_t width,
          const float* limit, float* packed) {
  for (int64_t k = 0; k < count; ++k) {
    const float* from = source + offsets[k];
    for (int64_t r = 0; r < run_count; ++r) {
      const float* at = from + runs[r].source;
      float* to = packed + runs[r].column;
      const int64_t length = runs[r].length;
      // What a vector brings beyond the run is overwritten by the next one.
      if (at + length + kSlack <= limit) {
        for (int64_t i = 0; i < length; i += kLanes) store(to + i, load(at + i));
      } else {
        std::memcpy(to, at, static_cast<size_t>(length) * sizeof(float));
      }
    }
    packed += width;
  }
}

// Lanes of two vectors of four, in the way that each compiler has.
#if defined(__clang__)
#define BNEXPORT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Lanes __attribute__((vector_size(16)));
#define BNEXPORT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Lanes{__VA_ARGS__})
#endif

void transpose(const float* source, const int64_t* offsets, int64_t columns, int64_t count, int64_t width,
               float* packed) {
  typedef float Four __attribute__((vector_size(16)));
  const auto load4 = [](const float* from) {
    Four v;
    std::memcpy(&v, from, sizeof(v));
    return v;
  };
  int64_t column = 0;
  for (; column + 4 <= columns; column += 4) {
    const float* from[4];
    for (int64_t c = 0; c < 4; ++c) from[c] = source + offsets[column + c];
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
      const Four a = load4(from[0] + k), b = load4(from[1] + k), c = load4(from[2] + k), d = load4(from[3] + k);
      const Four ab_low = BNEXPORT_SHUFFLE(a, b, 0, 4, 1, 5), ab_high = BNEXPORT_SHUFFLE(a, b, 2, 6, 3, 7);
      const Four cd_low = BNEXPORT_SHUFFLE(c, d, 0, 4, 1, 5), cd_high = BNEXPORT_SHUFFLE(c, d, 2, 6, 3, 7);
      const Four rows[4] = {BNEXPORT_SHUFFLE(ab_low, cd_low, 0, 1, 4, 5), BNEXPORT_SHUFFLE(ab_low, cd_low, 2, 3, 6, 7),
                            BNEXPORT_SHUFFLE(ab_high, cd_high, 0, 1, 4, 5),
                            BNEXPORT_SHUFFLE(ab_high, cd_high, 2, 3, 6, 7)};
      for (int64_t r = 0; r < 4; ++r) std::memcpy(packed + (k + r) * width + column, &rows[r], sizeof(Four));
    }
    for (; k < count; ++k) {
      for (int c = 0; c < 4; ++c) packed[k * width + column + c] = from[c][k];
    }
  }
  for (; column < columns; ++column) {
    for (int64_t k = 0; k < count; ++k) packed[k * width + column] = source[offsets[column] + k];
  }
  for (; column < width; ++column) {
    for (int64_t k = 0; k < count; ++k) packed[k * width + column] = 0;
  }
}

void correlate(const float* x, const int64_t* offsets, const float* weights, int64_t taps, float start, int64_t count,
               float* y) {
  constexpr int64_t kUnrolled = 4;
  for (int64_t i = 0; i < count; i += kUnrolled * kLanes) {
    Vector sums[kUnrolled];
    for (Vector& sum : sums) sum = Vector{} + start;
    for (int64_t t = 0; t < taps; ++t) {
      const float* at = x + offsets[t] + i;
      for (int64_t u = 0; u < kUnrolled; ++u) sums[u] += weights[t] * load(at + u * kLanes);
    }
    for (int64_t u = 0; u < kUnrolled; ++u) store(y + i + u * kLanes, sums[u]);
  }
}

template <int kTaps>
void correlations_of(const float* g, const float* x, const int64_t* offsets, int64_t count, double* sums) {
  Vector parts[kTaps] = {};
  const float* at[kTaps];
  for (int t = 0; t < kTaps; ++t) at[t] = x + offsets[t];
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector value = load(g + i);
#pragma GCC unroll 12
    for (int t = 0; t < kTaps; ++t) parts[t] += value * load(at[t] + i);
  }
  for (int t = 0; t < kTaps; ++t) {
    for (int lane = 0; lane < kLanes; ++lane) sums[t] += parts[t][lane];
  }
}

void correlations(const float* g, const float* x, const int64_t* offsets, int64_t taps, int64_t count, double* sums) {
  for (; taps >= 9; taps -= 9, offsets += 9, sums += 9) correlations_of<9>(g, x, offsets, count, sums);
  for (; taps >= 5; taps -= 5, offsets += 5, sums += 5) correlations_of<5>(g, x, offsets, count, sums);
  for (; taps > 0; --taps, ++offsets, ++sums) correlations_of<1>(g, x, offsets, count, sums);
}

}  // namespace

extern const Loops BNEXPORT_TABLE(loops);
const Loops BNEXPORT_TABLE(loops) = {kRows,
                                     kShortRows,
                                     kLanes,
                                     {nullptr, tile<1, kRows>, tile<2, kRows>, tile<3, kRows>},
                                     {nullptr, tile<1, kShortRows>, tile<2, kShortRows>, tile<3, kShortRows>},
                                     pack,
                                     transpose,
                                     correlate,
                                     correlations};

}  // namespace bnexport::cpu
