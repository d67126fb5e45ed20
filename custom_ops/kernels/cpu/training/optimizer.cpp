#include "optimizer.h"

#include "chunks.h"
#include "table.h"

namespace bnexport::cpu {

void update(const AdamUpdate& adam, int64_t count, Parallel& parallel) {
  const auto run = training_table().adam;
  const bool stream =
      streams(count, 7, {adam.new_parameter, adam.new_exp_avg, adam.new_exp_avg_sq, adam.new_max_exp_avg_sq});
  each_chunk(parallel, count, [&](int64_t first, int64_t length) { run(adam, first, length, stream); });
}

void update(const SgdUpdate& sgd, int64_t count, Parallel& parallel) {
  const auto run = training_table().sgd;
  const bool stream = streams(count, 5, {sgd.new_parameter, sgd.new_momentum_buffer});
  each_chunk(parallel, count, [&](int64_t first, int64_t length) { run(sgd, first, length, stream); });
}

}  // namespace bnexport::cpu
