// The operators of a training step, float32, on the CPU provider.
#ifndef BNEXPORT_SCHEMA_TRAINING_H
#define BNEXPORT_SCHEMA_TRAINING_H

#include "operator.h"

namespace bnexport::schema {

constexpr const char* kTrainingDomain = "bnexport";

constexpr size_t kTrainingOperatorCount = 7;
extern const Operator kTrainingOperators[kTrainingOperatorCount];

}  // namespace bnexport::schema

#endif  // BNEXPORT_SCHEMA_TRAINING_H
