// Integer arithmetic that kernels and launch plans share.
#pragma once

#include <cstdint>

namespace bnexport {

// a / b rounded up, for b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return a > 0 ? (a + b - 1) / b : -(-a / b); }

}  // namespace bnexport
