// Kernel arguments, and what becomes of a channel's moments or sums when they are known: this process's row, or
// statistics and coefficients of the output.
#pragma once

#include "../common/statistics_definitions.h"
#include "reduction.h"
#include "rows.h"

namespace bnexport::cuda {

template <class Params, class Coefficients>
struct Arguments {
  Params params;                // device pointers
  Rows rows;                    // of NCS tensors
  int parts = 1;                // blocks that share a tile of channels (one channel of NCS tensors)
  int64_t part_length = 0;      // units of a part of NCS tensors, rows of one of NSC tensors
  int tiles = 0, lanes = 1;     // NSC: tiles, and threads side by side
  uint32_t* tickets = nullptr;  // one a tile, 0 before and after
  Pair* partials = nullptr;     // of each part and channel
  Coefficients* coefficients = nullptr;
  double* row = nullptr;  // where the statistics go when they are not finished here
};
using ForwardArguments = Arguments<bnexport_forward, ForwardCoefficients>;
using BackwardArguments = Arguments<bnexport_backward, BackwardCoefficients>;

template <class Args>
BNEXPORT_DEVICE void write_row(const Args& args, int64_t c, double first, double second) {
  if (c == 0) args.row[0] = row_weight(args.params.stats_mode, args.params.N, args.params.S);
  if (c >= args.params.C) return;
  args.row[1 + c] = first;
  args.row[1 + args.params.C + c] = second;
}

BNEXPORT_DEVICE void finish(const ForwardArguments& args, int64_t c, const Moments& moments) {
  if (args.row != nullptr) {
    write_row(args, c, moments.mean, row_spread(args.params.stats_mode, moments));
  } else {
    args.coefficients[c] = finish_training(args.params, c, local_statistics(moments));
  }
}

BNEXPORT_DEVICE void finish(const BackwardArguments& args, int64_t c, const GradientSums& sums) {
  if (args.row != nullptr) {
    write_row(args, c, sums.dy, sums.dy_x_hat);
    return;
  }
  const bnexport_backward& params = args.params;
  const GroupShare share = params.training ? group_share(params) : GroupShare{};
  const BackwardCoefficients k = finish_backward(params, c, sums, share);
  if (params.training) {
    args.coefficients[c] = k;
  } else {  // dx = scale * dy, by the forward's kernel
    reinterpret_cast<ForwardCoefficients*>(args.coefficients)[c] = {0, k.scale, 0};
  }
}

// A thread a channel, where no pass over the data comes before: the group's rows, fixed statistics, no data.
BNEXPORT_KERNEL(2) forward_channels(BNEXPORT_ARGUMENTS ForwardArguments args) {
  const bnexport_forward& params = args.params;
  const int64_t c = int64_t{block_index()} * kThreads + thread_index();
  if (args.row != nullptr) return write_row(args, c, 0, 0);
  if (c >= params.C) return;
  if (!params.training) {
    args.coefficients[c] = finish_inference(params, c);
  } else {
    args.coefficients[c] =
        finish_training(params, c, params.group_size > 1 ? gathered_statistics(params, c) : GroupStatistics{});
  }
}

BNEXPORT_KERNEL(2) backward_channels(BNEXPORT_ARGUMENTS BackwardArguments args) {
  const bnexport_backward& params = args.params;
  const int64_t c = int64_t{block_index()} * kThreads + thread_index();
  if (args.row != nullptr) return write_row(args, c, 0, 0);
  if (c >= params.C) return;
  GradientSums sums;
  if (params.group_size > 1) sums = {params.local_moments[1 + c], params.local_moments[1 + params.C + c]};
  finish(args, c, sums);
}

// The forward's statistics as the backward reads them.
BNEXPORT_DEVICE double saved_mean(const bnexport_backward& params, int64_t c) {
  return load_statistic(params.saved_mean, saved_dtype(params), c, 0);
}
BNEXPORT_DEVICE double saved_invstd(const bnexport_backward& params, int64_t c) {
  return load_statistic(params.saved_invstd, saved_dtype(params), c, 0);
}

}  // namespace bnexport::cuda
