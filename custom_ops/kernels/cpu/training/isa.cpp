// The training kernels' table for one instruction set. Compiled once for each, as ../isa.cpp is.
#include "elementwise_loops.h"
#include "optimizer_loops.h"
#include "pooling_loops.h"
#include "table.h"

#define BNEXPORT_CONCAT_(a, b) a##b
#define BNEXPORT_CONCAT(a, b) BNEXPORT_CONCAT_(a, b)

namespace bnexport::cpu {

extern const TrainingTable BNEXPORT_CONCAT(training_table_, BNEXPORT_ISA);
constexpr TrainingTable BNEXPORT_CONCAT(training_table_, BNEXPORT_ISA) = {
    relu_gradient_loop,
    adam_loop,
    sgd_loop,
    max_pool_gradient_loop,
};

}  // namespace bnexport::cpu
