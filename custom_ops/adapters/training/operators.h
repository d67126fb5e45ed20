// The operators of a training step, and who makes the kernel of each.
#ifndef BNEXPORT_ADAPTERS_TRAINING_OPERATORS_H
#define BNEXPORT_ADAPTERS_TRAINING_OPERATORS_H

#include "../../schema/training.h"
#include "../node.h"

namespace bnexport::adapters {

struct TrainingOperator {
  const schema::Operator* schema;
  MakeKernel* make;
};

schema::List<TrainingOperator> training_operators();

}  // namespace bnexport::adapters

#endif  // BNEXPORT_ADAPTERS_TRAINING_OPERATORS_H
