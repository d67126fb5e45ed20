// The training kernels' table for one instruction set (../processor.h).
#include "../processor.h"
#include "elementwise_loops.h"
#include "optimizer_loops.h"
#include "pooling_loops.h"
#include "table.h"

namespace bnexport::cpu {

extern const TrainingTable BNEXPORT_TABLE(training_table);
constexpr TrainingTable BNEXPORT_TABLE(training_table) = {
    relu_gradient_loop,
    adam_loop,
    sgd_loop,
    max_pool_gradient_loop,
};

}  // namespace bnexport::cpu
