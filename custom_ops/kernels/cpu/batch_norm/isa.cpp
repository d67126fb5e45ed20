// The tables of inner loops for one instruction set. Compiled once for each, with BNEXPORT_ISA the
// name (baseline, avx2, avx512) and the matching compiler flags.
#include "columns.h"
#include "map_rows.h"
#include "rows.h"
#include "table.h"

#define BNEXPORT_CONCAT_(a, b) a##b
#define BNEXPORT_CONCAT(a, b) BNEXPORT_CONCAT_(a, b)

namespace bnexport::cpu {
namespace {

void merge(Moments* all, const Moments* part, int64_t count) {
  for (int64_t i = 0; i < count; ++i) all[i].merge(part[i]);
}

template <class T>
constexpr Table make_table() {
  return {sizeof(typename T::Storage),
          moments<T>,
          normalise<T>,
          gradient_sums<T>,
          gradient<T>,
          column_moments<T>,
          column_normalise<T>,
          column_gradient_sums<T>,
          column_gradient<T>,
          merge,
          merge_columns};
}

}  // namespace

// In the order of bnexport_dtype.
extern const Table BNEXPORT_CONCAT(tables_, BNEXPORT_ISA)[4];
constexpr Table BNEXPORT_CONCAT(tables_, BNEXPORT_ISA)[4] = {make_table<Float32>(), make_table<Float16>(),
                                                             make_table<BFloat16>(), make_table<Float64>()};

}  // namespace bnexport::cpu
