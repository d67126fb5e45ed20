// An NCS tensor as kernels see it: rows (n, c) of S values, cut into aligned vectors ("units").
//
// A row need not begin or end where a vector does; its first and last unit then hold fewer values, told
// by a span, so that every access is aligned and touches only the row's own elements. The slab of a
// channel is its N rows; its units are counted through, `units` to a row, some of them empty when rows
// begin at different places.
#pragma once

#include <cstdint>

#include "../common/moments.h"

namespace bnexport::cuda {

// Quotients of numbers below 2^31 without division (Granlund, Montgomery: Division by Invariant
// Integers using Multiplication, 1994): with l = ceil(log2 d) and m = floor(2^32 (2^l - d) / d) + 1,
// n / d = (mulhi(n, m) + n) >> l.
struct Divider {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  Divider() = default;
  explicit Divider(uint32_t d) : divisor(d) {  // d > 0
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }
  BNEXPORT_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    return (static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier >> 32) + n) >> shift;
  }
};

struct Rows {
  int64_t N = 0, C = 0, S = 0;
  int64_t stride = 0;  // from a row of a channel to its next
  bool whole = true;   // every unit of a row is full
  Divider units;

  Rows() = default;
  // Units of `width` values; S below 2^31.
  Rows(int64_t N, int64_t C, int64_t S, int64_t width) : N(N), C(C), S(S), stride(C * S) {
    whole = S % width == 0;
    if (S > 0) units = Divider(static_cast<uint32_t>(whole ? S / width : (S + 2 * width - 2) / width));
  }

  int64_t slab_units() const { return N * static_cast<int64_t>(units.divisor); }
};

// Units [begin, end) of a channel's slab, counted from the start of a row, which lies `origin` elements
// from the start of the tensor.
struct Range {
  int64_t origin = 0;
  uint32_t begin = 0, end = 0;
};

// Part `part` of the slab of channel c, cut into parts of `length` units (length + units below 2^31).
BNEXPORT_HOST_DEVICE inline Range part_of_slab(const Rows& rows, int64_t c, int64_t part, int64_t length) {
  const int64_t units = rows.units.divisor, total = rows.N * units;
  const int64_t begin = part * length < total ? part * length : total;
  const int64_t end = begin + length < total ? begin + length : total;
  // Almost never is a slab so large that it takes a real division.
  const int64_t first = begin < int64_t{1} << 31 ? rows.units.quotient(static_cast<uint32_t>(begin)) : begin / units;
  Range range;
  range.origin = first * rows.stride + c * rows.S;
  range.begin = static_cast<uint32_t>(begin - first * units);
  range.end = range.begin + static_cast<uint32_t>(end - begin);
  return range;
}

// Elements [begin, end) of a vector. They are compared, not tested as bits of a mask: ptxas of CUDA 13.0 took one
// vector's bit for another's.
struct Span {
  int begin = 0, end = 0;

  BNEXPORT_HOST_DEVICE int count() const { return end - begin; }
};

// Where a unit lies: `offset` in elements from the start of the tensor, and those of its elements that belong to the
// row. `whole` is rows.whole, known when compiled.
struct Unit {
  int64_t offset = 0;
  Span span;
};
template <int width, bool whole>
BNEXPORT_HOST_DEVICE inline Unit unit_of_slab(const Rows& rows, const Range& range, uint32_t index) {
  const uint32_t row = rows.units.quotient(index), unit = index - row * rows.units.divisor;
  const int64_t start = range.origin + static_cast<int64_t>(row * static_cast<uint64_t>(rows.stride));
  const auto within = static_cast<int64_t>(static_cast<uint64_t>(unit) * width);
  if (whole) return {start + within, {0, width}};
  const int lead = static_cast<int>(start & (width - 1));  // elements of the first unit that are not the row's
  const int64_t rest = lead + rows.S - within;             // elements up to the row's end
  const int end = rest >= width ? width : rest > 0 ? static_cast<int>(rest) : 0;
  return {start - lead + within, {unit == 0 ? lead : 0, end}};
}

}  // namespace bnexport::cuda
