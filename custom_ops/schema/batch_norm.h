// Batch norm and its gradient.
#ifndef BNEXPORT_SCHEMA_BATCH_NORM_H
#define BNEXPORT_SCHEMA_BATCH_NORM_H

#include "operator.h"

namespace bnexport::schema {

extern const Operator kForward, kBackward;

}  // namespace bnexport::schema

#endif  // BNEXPORT_SCHEMA_BATCH_NORM_H
