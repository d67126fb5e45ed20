// Tensors of every element type, the naive reference in long double, and the bounds of bnexport/tolerances.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "bnexport.h"
#include "check.h"
#include "halves.h"

inline int64_t bytes_of(int32_t dtype) { return dtype == BNEXPORT_FLOAT64 ? 8 : dtype == BNEXPORT_FLOAT32 ? 4 : 2; }

// Elements from `offset` bytes behind a 16-byte boundary on. Under AddressSanitizer nothing lies behind
// the last one; otherwise a guard does, that must not change.
class Buffer {
 public:
  Buffer(int32_t dtype, int64_t count, int64_t offset = 0)
      : dtype_(dtype),
        size_(bytes_of(dtype)),
        count_(count),
        offset_(offset),
        bytes_(static_cast<size_t>(offset + count * size_) + kGuard),
        data_(new unsigned char[bytes_]) {
    poison();
  }
  Buffer(const Buffer& other) : Buffer(other.dtype_, other.count_, other.offset_) {
    std::copy_n(other.data_.get(), bytes_, data_.get());
  }

  Buffer& operator=(const Buffer& other) {
    std::copy_n(other.data_.get(), bytes_, data_.get());
    return *this;
  }

  void poison() { std::fill_n(data_.get(), bytes_, static_cast<unsigned char>(0xff)); }  // NaN in every type
  void* data() { return data_.get() + offset_; }
  int64_t count() const { return count_; }
  bool same_bits(const Buffer& other) const { return std::equal(data_.get(), data_.get() + bytes_, other.data_.get()); }
  bool guards_hold() const {
    const unsigned char *first = data_.get(), *last = data_.get() + bytes_;
    const auto untouched = [](unsigned char byte) { return byte == 0xff; };
    return std::all_of(first, first + offset_, untouched) && std::all_of(last - kGuard, last, untouched);
  }

  double get(int64_t i) const {
    using namespace bnexport;
    if (dtype_ == BNEXPORT_FLOAT64) return read<double>(i);
    if (dtype_ == BNEXPORT_FLOAT32) return static_cast<double>(read<float>(i));
    const auto bits = read<uint16_t>(i);
    return static_cast<double>(dtype_ == BNEXPORT_FLOAT16 ? half_to_float(bits) : bfloat_to_float(bits));
  }
  void set(int64_t i, double value) {
    using namespace bnexport;
    const auto narrow = static_cast<float>(value);
    if (dtype_ == BNEXPORT_FLOAT64) {
      write(i, value);
    } else if (dtype_ == BNEXPORT_FLOAT32) {
      write(i, narrow);
    } else {
      write(i, dtype_ == BNEXPORT_FLOAT16 ? float_to_half(narrow) : float_to_bfloat(narrow));
    }
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kGuard = 0;
#else
  static constexpr size_t kGuard = 64;
#endif
  template <class T>
  T read(int64_t i) const {
    T value;
    std::memcpy(&value, data_.get() + offset_ + i * size_, sizeof(T));
    return value;
  }
  template <class T>
  void write(int64_t i, T value) {
    std::memcpy(data_.get() + offset_ + i * size_, &value, sizeof(T));
  }
  int32_t dtype_;
  int64_t size_, count_, offset_;
  size_t bytes_;
  std::unique_ptr<unsigned char[]> data_;
};

struct Shape {
  int64_t N, C, S;
  int64_t elements() const { return N * C * S; }
  int64_t at(int32_t layout, int64_t n, int64_t c, int64_t s) const {
    return layout == BNEXPORT_NCS ? (n * C + c) * S + s : (n * S + s) * C + c;
  }
  template <class Visit>
  void each(int32_t layout, int64_t c, const Visit& visit) const {
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t s = 0; s < S; ++s) visit(at(layout, n, c, s));
    }
  }
};

// Of one channel, over the tensors of a group.
struct Reference {
  long double count = 0, mean = 0, variance = 0, dy = 0, dy_x_hat = 0, absolute_dy = 0, absolute_dy_x_hat = 0;

  Reference(const std::vector<Shape>& shapes, int32_t layout, const std::vector<const Buffer*>& xs, int64_t c) {
    for (const Shape& shape : shapes) count += static_cast<long double>(shape.N * shape.S);
    const auto each = [&](const auto& visit) {
      for (size_t r = 0; r < shapes.size(); ++r) {
        shapes[r].each(layout, c, [&](int64_t i) { visit(static_cast<long double>(xs[r]->get(i))); });
      }
    };
    each([&](long double x) { mean += x / count; });
    each([&](long double x) { variance += (x - mean) * (x - mean) / count; });
  }
  void add_gradient(const Shape& shape, int32_t layout, const Buffer& x, const Buffer& dy_values, long double invstd,
                    int64_t c) {
    shape.each(layout, c, [&](int64_t i) {
      const auto g = static_cast<long double>(dy_values.get(i));
      const long double x_hat = (static_cast<long double>(x.get(i)) - mean) * invstd;
      dy += g;
      dy_x_hat += g * x_hat;
      absolute_dy += std::fabs(g);
      absolute_dy_x_hat += std::fabs(g * x_hat);
    });
  }
};

// The unit roundoff of a type, and of the type that statistics are computed in.
inline double roundoff(int32_t dtype) {
  constexpr double kUnit[] = {0x1p-24, 0x1p-11, 0x1p-8, 0x1p-53};
  return kUnit[dtype];
}
inline double statistics_roundoff(int32_t dtype) { return std::min(roundoff(dtype), 0x1p-24); }

// A call for one shape, in train mode: `y` is the output of a forward, the gradient by the input of a backward.
template <class Params>
Params params_of(const Shape& shape, int32_t dtype, int32_t layout, Buffer& x, Buffer& y, std::vector<double>& saved,
                 int threads) {
  Params p{};
  p.struct_size = sizeof(p);
  p.dtype = dtype;
  p.stats_dtype = BNEXPORT_FLOAT64;
  p.layout = layout;
  p.N = shape.N;
  p.C = shape.C;
  p.S = shape.S;
  p.x = x.data();
  p.saved_mean = saved.data();
  p.saved_invstd = saved.data() + shape.C;
  p.training = 1;
  p.group_size = 1;
  p.threads = threads;
  if constexpr (std::is_same_v<Params, bnexport_forward>) {
    p.y = y.data();
    p.momentum = 0.25;
    p.eps = 1e-3;
  } else {
    p.dy = x.data();
    p.dx = y.data();
  }
  return p;
}
