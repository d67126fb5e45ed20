// The operators of a training step: name, inputs, outputs and attributes of each. float32, on the CPU provider.
// bnexport/training/building/contract.py is the contract; a test compares the two.
#ifndef BNEXPORT_SCHEMA_TRAINING_H
#define BNEXPORT_SCHEMA_TRAINING_H

#include "operator.h"

namespace bnexport::schema {

constexpr const char* kTrainingDomain = "bnexport";

extern const Operator kConv, kConvInputGrad, kConvWeightGrad, kReluGrad, kMaxPoolGrad, kAdamUpdate, kSgdUpdate;
extern const Operator* const kTrainingOperators[7];

}  // namespace bnexport::schema

#endif  // BNEXPORT_SCHEMA_TRAINING_H
