// The tables of inner loops for one instruction set (processor.h).
#include "../processor.h"
#include "columns.h"
#include "map_rows.h"
#include "rows.h"
#include "table.h"

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
extern const Table BNEXPORT_TABLE(tables)[4];
constexpr Table BNEXPORT_TABLE(tables)[4] = {make_table<Float32>(), make_table<Float16>(), make_table<BFloat16>(),
                                             make_table<Float64>()};

}  // namespace bnexport::cpu
