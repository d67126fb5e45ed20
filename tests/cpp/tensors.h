// Tensors of every element type as exactly sized heap blocks, so that a sanitizer sees each access past
// the end, and the naive double reference.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "bnexport.h"

struct Shape {
  int64_t N, C, S;
  int64_t elements() const { return N * C * S; }
};

inline int64_t size_of(int32_t dtype) { return dtype == BNEXPORT_FLOAT32 ? 4 : dtype == BNEXPORT_FLOAT64 ? 8 : 2; }

inline double half_to_double(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  double value = exponent == 0    ? std::ldexp(fraction, -24)
                 : exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                  : std::ldexp(1024 + fraction, exponent - 25);
  return half & 0x8000 ? -value : value;
}

class Tensor {
 public:
  Tensor(int32_t dtype, int64_t elements)
      : dtype_(dtype), bytes_(static_cast<size_t>(elements * size_of(dtype))), data_(new unsigned char[bytes_]) {}

  void* data() { return data_.get(); }
  const void* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }

  double get(int64_t i) const {
    const unsigned char* at = data_.get() + i * size_of(dtype_);
    if (dtype_ == BNEXPORT_FLOAT64) return read<double>(at);
    if (dtype_ == BNEXPORT_FLOAT32) return static_cast<double>(read<float>(at));
    if (dtype_ == BNEXPORT_FLOAT16) return half_to_double(read<uint16_t>(at));
    const uint32_t wide = static_cast<uint32_t>(read<uint16_t>(at)) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return static_cast<double>(value);
  }

  // Small multiples of 1/16, which every type holds.
  void fill(uint32_t seed) {
    std::mt19937 random(seed);
    for (size_t i = 0; i < bytes_ / static_cast<size_t>(size_of(dtype_)); ++i) {
      const double value = static_cast<double>(static_cast<int>(random() % 129) - 32) / 16;
      unsigned char* at = data_.get() + i * static_cast<size_t>(size_of(dtype_));
      if (dtype_ == BNEXPORT_FLOAT64) {
        write(at, value);
      } else if (dtype_ == BNEXPORT_FLOAT32) {
        write(at, static_cast<float>(value));
      } else if (dtype_ == BNEXPORT_BFLOAT16) {
        const auto narrow = static_cast<float>(value);
        uint32_t wide;
        std::memcpy(&wide, &narrow, 4);
        write(at, static_cast<uint16_t>(wide >> 16));
      } else {
        int exponent;  // the value is fraction * 2^exponent, with at most 8 bits in the fraction
        const double fraction = std::frexp(std::fabs(value), &exponent);
        const int half = value == 0 ? 0 : (exponent + 14) << 10 | (static_cast<int>(fraction * 2048) & 1023);
        write(at, static_cast<uint16_t>(half | (value < 0 ? 0x8000 : 0)));
      }
    }
  }

 private:
  template <class T>
  static T read(const unsigned char* at) {
    T value;
    std::memcpy(&value, at, sizeof(T));
    return value;
  }
  template <class T>
  static void write(unsigned char* at, T value) {
    std::memcpy(at, &value, sizeof(T));
  }
  int32_t dtype_;
  size_t bytes_;
  std::unique_ptr<unsigned char[]> data_;
};

inline int64_t index_of(const Shape& shape, int32_t layout, int64_t n, int64_t c, int64_t s) {
  return layout == BNEXPORT_NCS ? (n * shape.C + c) * shape.S + s : (n * shape.S + s) * shape.C + c;
}

struct Statistics {
  double mean = 0, variance = 0, dy = 0, dy_x_hat = 0;
};

inline Statistics naive(const Shape& shape, int32_t layout, const Tensor& x, const Tensor* dy, double eps, int64_t c) {
  // long double: the sums here are naive, and must still be better than those they judge.
  long double mean = 0, variance = 0, sum = 0, product = 0;
  const auto n = static_cast<long double>(shape.N * shape.S);
  const auto each = [&](const auto& visit) {
    for (int64_t i = 0; i < shape.N; ++i) {
      for (int64_t s = 0; s < shape.S; ++s) visit(index_of(shape, layout, i, c, s));
    }
  };
  each([&](int64_t i) { mean += static_cast<long double>(x.get(i)) / n; });
  each([&](int64_t i) {
    variance += (static_cast<long double>(x.get(i)) - mean) * (static_cast<long double>(x.get(i)) - mean) / n;
  });
  if (dy != nullptr) {
    const long double invstd = 1 / std::sqrt(variance + static_cast<long double>(eps));
    each([&](int64_t i) {
      sum += static_cast<long double>(dy->get(i));
      product += static_cast<long double>(dy->get(i)) * (static_cast<long double>(x.get(i)) - mean) * invstd;
    });
  }
  return {static_cast<double>(mean), static_cast<double>(variance), static_cast<double>(sum),
          static_cast<double>(product)};
}
