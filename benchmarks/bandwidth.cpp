// The floor that kernels are measured against: read passes and copies in OpenMP threads. bench_ort_cpu.py compiles it.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

typedef float Vector __attribute__((vector_size(64)));

constexpr int64_t kPiece = 1 << 17;  // bytes a task

template <class Body>
void pieces(int64_t bytes, int threads, const Body& body) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t start = 0; start < bytes; start += kPiece) body(start, bytes - start < kPiece ? bytes - start : kPiece);
}

volatile float sink;

}  // namespace

extern "C" {

// way 0: memcpy, 1: plain vector stores, 2: streaming stores. `bytes` and pointers: multiples of 64.
__attribute__((visibility("default"))) void copy(void* to, const void* from, int64_t bytes, int threads, int way) {
  pieces(bytes, threads, [&](int64_t start, int64_t size) {
    auto* d = static_cast<char*>(to) + start;
    const auto* s = static_cast<const char*>(from) + start;
    if (way == 0) {
      std::memcpy(d, s, static_cast<size_t>(size));
      return;
    }
    for (int64_t i = 0; i < size; i += 64) {
      Vector v;
      std::memcpy(&v, s + i, 64);
      if (way == 1) {
        std::memcpy(d + i, &v, 64);
      } else {
#if defined(__AVX512F__)
        _mm512_stream_ps(reinterpret_cast<float*>(d + i), (__m512)v);
#else
        for (int k = 0; k < 64; k += 16) {
          __m128 part;
          std::memcpy(&part, reinterpret_cast<const char*>(&v) + k, 16);
          _mm_stream_ps(reinterpret_cast<float*>(d + i + k), part);
        }
#endif
      }
    }
    if (way == 2) _mm_sfence();
  });
}

__attribute__((visibility("default"))) void read_pass(const void* from, int64_t bytes, int threads) {
  pieces(bytes, threads, [&](int64_t start, int64_t size) {
    const auto* s = static_cast<const char*>(from) + start;
    Vector a{}, b{}, c{}, d{};
    const auto load = [&](int64_t at) {
      Vector v;
      std::memcpy(&v, s + at, 64);
      return v;
    };
    int64_t i = 0;
    for (; i + 256 <= size; i += 256) {
      a += load(i);
      b += load(i + 64);
      c += load(i + 128);
      d += load(i + 192);
    }
    for (; i < size; i += 64) a += load(i);
    a = (a + b) + (c + d);
    sink = a[0];
  });
}

// Reads two tensors, writes a third: what the second half of the backward pass must at least do.
__attribute__((visibility("default"))) void combine(void* to, const void* x, const void* dy, int64_t bytes, int threads,
                                                    int way) {
  pieces(bytes, threads, [&](int64_t start, int64_t size) {
    auto* d = static_cast<char*>(to) + start;
    const auto* p = static_cast<const char*>(x) + start;
    const auto* q = static_cast<const char*>(dy) + start;
    for (int64_t i = 0; i < size; i += 64) {
      Vector v, w;
      std::memcpy(&v, p + i, 64);
      std::memcpy(&w, q + i, 64);
      v += w;
#if defined(__AVX512F__)
      if (way == 2) {
        _mm512_stream_ps(reinterpret_cast<float*>(d + i), (__m512)v);
        continue;
      }
#endif
      std::memcpy(d + i, &v, 64);
    }
    if (way == 2) _mm_sfence();
  });
}
}
