// The operators of a training step, float32, on the CPU provider.
#pragma once

#include "operator.h"

namespace bnexport::schema {

constexpr const char* kTrainingDomain = "bnexport";

constexpr size_t kTrainingOperatorCount = 7;
extern const Operator kTrainingOperators[kTrainingOperatorCount];

}  // namespace bnexport::schema
