// Validation shared by the C APIs: sizes, enums and pointers are checked before any work, and no exception
// leaves the library.
#pragma once

#include <cmath>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>

#include "bnexport.h"

namespace bnexport::capi {

class Refusal : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void refuse(const std::string& what, const std::string& got, const std::string& expected) {
  throw Refusal(what + ": got " + got + ", expected " + expected);
}

inline void require_range(const char* what, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  refuse(what, std::to_string(value), std::to_string(low) + " to " + std::to_string(high));
}

inline void require_pointer(const char* what, const void* pointer) {
  if (pointer == nullptr) refuse(what, "NULL", "a pointer");
}

// What both structs have in common.
template <class Params>
int64_t validate_common(const Params* params) {
  require_pointer("params", params);
  if (params->struct_size < sizeof(Params)) {
    refuse("params.struct_size", std::to_string(params->struct_size), std::to_string(sizeof(Params)) + " or more");
  }
  require_range("params.dtype", params->dtype, 0, 3);
  if (params->stats_dtype != BNEXPORT_FLOAT32 && params->stats_dtype != BNEXPORT_FLOAT64) {
    refuse("params.stats_dtype", std::to_string(params->stats_dtype), "0 (float32) or 3 (float64)");
  }
  require_range("params.layout", params->layout, 0, 1);
  int64_t bytes = 8;
  bool overflow = false;
  for (const int64_t dimension : {params->N, params->C, params->S}) {
    // A dimension of 0 must not hide the others: C alone sizes rows.
    overflow |= dimension < 0 || __builtin_mul_overflow(bytes, dimension > 0 ? dimension : 1, &bytes);
  }
  if (overflow) {
    const std::string sizes =
        std::to_string(params->N) + ", " + std::to_string(params->C) + ", " + std::to_string(params->S);
    refuse("params.N, C, S", sizes, "sizes >= 0 whose product is below 2^60");
  }
  require_range("params.training", params->training, 0, 1);
  require_range("params.stats_mode", params->stats_mode, 0, 2);
  require_range("params.group_size", params->group_size, 1, 1000000);
  require_range("params.saved_as_statistics", params->saved_as_statistics, 0, 1);
  return params->N * params->C * params->S;
}

inline void validate(const bnexport_forward* params, bool row_only) {
  const int64_t elements = validate_common(params);
  if (elements > 0) require_pointer("params.x", params->x);
  if (row_only) return;
  if (elements > 0) require_pointer("params.y", params->y);
  if (!(params->momentum >= 0 && params->momentum <= 1)) {
    refuse("params.momentum", std::to_string(params->momentum), "a number in [0, 1]");
  }
  if (!(params->eps >= 0 && std::isfinite(params->eps))) {
    refuse("params.eps", std::to_string(params->eps), "a finite number >= 0");
  }
  if (!params->training && params->C > 0) {
    require_pointer("params.running_mean (training is 0)", params->running_mean);
    require_pointer("params.running_var (training is 0)", params->running_var);
  }
  if (params->running_mean_out != nullptr) {
    require_pointer("params.running_mean (running_mean_out is set)", params->running_mean);
  }
  if (params->running_var_out != nullptr) {
    require_pointer("params.running_var (running_var_out is set)", params->running_var);
  }
  if (params->training && params->group_size > 1) require_pointer("params.gathered (group_size > 1)", params->gathered);
}

inline void validate(const bnexport_backward* params, bool row_only) {
  const int64_t elements = validate_common(params);
  require_range("params.grad_reduction", params->grad_reduction, 0, 2);
  if (elements > 0) {
    require_pointer("params.dy", params->dy);
    require_pointer("params.x", params->x);
  }
  if (params->C > 0) {
    require_pointer("params.saved_mean", params->saved_mean);
    require_pointer("params.saved_invstd", params->saved_invstd);
  }
  if (row_only) return;
  const bool exchanges = params->training || params->grad_reduction != BNEXPORT_GRAD_LOCAL;
  if (params->group_size > 1 && exchanges) {
    require_pointer("params.gathered (group_size > 1)", params->gathered);
    require_pointer("params.local_moments (group_size > 1)", params->local_moments);
  }
}

template <class Body>
int guarded(char* error, size_t capacity, const Body& body) noexcept {
  const auto report = [&](int code, const char* message) {
    if (error != nullptr && capacity > 0) std::snprintf(error, capacity, "%s", message);
    return code;
  };
  try {
    body();
    return 0;
  } catch (const Refusal& refusal) {
    return report(1, refusal.what());
  } catch (const std::bad_alloc&) {
    return report(2, "not enough memory");
  } catch (const std::exception& exception) {
    return report(3, exception.what());
  } catch (...) {
    return report(3, "unknown error");
  }
}

}  // namespace bnexport::capi
