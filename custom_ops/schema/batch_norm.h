// Batch norm and its gradient.
#pragma once

#include "operator.h"

namespace bnexport::schema {

extern const Operator kForward, kBackward;

}  // namespace bnexport::schema
