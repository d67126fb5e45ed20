// Columns of a matrix by bands of whole channels, and the data of each channel.
#pragma once

#include <vector>

#include "../parallel.h"
#include "plan.h"

namespace bnexport::cpu {

// Bands of at most `channels` channels. Arrays of columns have `pitch` entries; those of band b begin at at(b), and
// kSpareColumns lie behind them.
struct Bands {
  const ColumnPlan& plan;
  int64_t channels, count;

  Bands(const ColumnPlan& plan, int64_t channels)
      : plan(plan), channels(channels > 0 ? channels : 1), count(ceil_div(plan.C, this->channels)) {}

  int64_t first(int64_t b) const { return b * channels; }
  int64_t last(int64_t b) const { return first(b) + channels < plan.C ? first(b) + channels : plan.C; }
  int64_t column(int64_t b) const { return first(b) * plan.inner; }
  int64_t columns(int64_t b) const { return plan.columns_of(last(b) - first(b)); }
  int64_t at(int64_t b) const { return column(b) + b * kSpareColumns; }
  int64_t pitch() const { return plan.cols + count * kSpareColumns; }

  // visit(band, first channel, last channel) in parallel, for pieces of bands.
  template <class Visit>
  void each_piece(Parallel& parallel, int64_t elements, const Visit& visit) const {
    const int64_t pieces = plan.fold == 1 && elements >= kSerial ? 4 : 1;
    parallel_for(parallel, count * pieces, [&](int64_t task) {
      const int64_t b = task / pieces, i = task % pieces, channels = last(b) - first(b);
      visit(b, first(b) + channels * i / pieces, first(b) + channels * (i + 1) / pieces);
    });
  }
};

// Two sums of each column for each chunk of rows.
class ColumnParts {
 public:
  ColumnParts(const ColumnPlan& plan, int64_t channels)
      : bands(plan, channels), data_(static_cast<size_t>(2 * plan.all_chunks() * bands.pitch())) {}

  double* first(int64_t k, int64_t b) { return data_.data() + 2 * k * bands.pitch() + bands.at(b); }
  double* second(int64_t k, int64_t b) { return first(k, b) + bands.pitch(); }

  const Bands bands;

 private:
  std::vector<double> data_;
};

// The coefficients of channels or columns as the loops read them: arrays of the compute type.
class CoefficientPlanes {
 public:
  CoefficientPlanes(int32_t dtype, int64_t planes, int64_t columns)
      : wide_(dtype == BNEXPORT_FLOAT64),
        pitch_(columns + kSpareColumns),
        data_(static_cast<size_t>(wide_ ? planes * pitch_ : ceil_div(planes * pitch_, 2))) {}

  void set(int64_t column, const ForwardCoefficients& k) { write(column, k.mean, k.scale, k.bias); }
  void set(int64_t column, const BackwardCoefficients& k) { write(column, k.mean, k.scale, k.offset, k.slope, k.rest); }
  // The same for all columns of a channel.
  template <class Coefficients>
  void set(const ColumnPlan& plan, int64_t channel, const Coefficients& k) {
    for (int64_t f = 0; f < plan.fold; ++f) {
      for (int64_t s = 0; s < plan.inner; ++s) set((f * plan.C + channel) * plan.inner + s, k);
    }
  }

  Planes from(int64_t column) const {
    return {reinterpret_cast<const unsigned char*>(data_.data()) + column * (wide_ ? 8 : 4), pitch_};
  }

 private:
  template <class... Values>
  void write(int64_t at, Values... values) {
    const auto one = [&](double value) {
      // A NaN in the form that survives the rounding to bfloat16 (native.h).
      if (value != value) value = static_cast<double>(__builtin_nanf(""));
      if (wide_) {
        data_[static_cast<size_t>(at)] = value;
      } else {
        reinterpret_cast<float*>(data_.data())[at] = static_cast<float>(value);
      }
      at += pitch_;
    };
    (one(values), ...);
  }

  bool wide_;
  int64_t pitch_;
  std::vector<double> data_;
};

}  // namespace bnexport::cpu
