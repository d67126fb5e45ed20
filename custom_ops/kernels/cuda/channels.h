// Kernel arguments, and the kernels between the two passes over the data: a channel's parts are added up and become
// this process's row, or statistics and the coefficients of the output.
#pragma once

#include "../common/statistics_definitions.h"
#include "reduction.h"
#include "rows.h"

namespace bnexport::cuda {

template <class Params, class Coefficients, class Partial>
struct Arguments {
  Params params;                // device pointers
  Rows rows;                    // of NCS tensors
  int parts = 0;                // blocks that share a tile of channels (one channel of NCS tensors)
  int64_t part_length = 0;      // units of a part of NCS tensors, rows of one of NSC tensors
  int tiles = 0, lanes = 1;     // NSC: tiles, and threads side by side
  int side_by_side = 1;         // channels of a block of the kernels here
  Partial* partials = nullptr;  // (parts, C); null without a pass over the data
  Coefficients* coefficients = nullptr;
  double* row = nullptr;  // where the statistics go when they are not finished here
};
using ForwardArguments = Arguments<bnexport_forward, ForwardCoefficients, Moments>;
using BackwardArguments = Arguments<bnexport_backward, BackwardCoefficients, GradientSums>;

// Adds up the parts of this thread's channel c, in their order; complete in the first `side_by_side` threads.
template <class Sums, class Args, class Add>
BNEXPORT_DEVICE Sums sum_of_parts(const Args& args, int64_t c, const Add& add) {
  constexpr int kAhead = 4;  // parts that are read at the same time
  const int step = kThreads / args.side_by_side, parts = c < args.params.C ? args.parts : 0;
  Sums sums{};
  for (int first = thread_index() / args.side_by_side; first < parts; first += kAhead * step) {
    std::remove_pointer_t<decltype(args.partials)> some[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * step < parts) some[i] = load_result(args.partials + (first + i * step) * args.params.C + c);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) add(sums, some[i]);
  }
  return merge_threads(sums, args.side_by_side);
}

// Vectors of the layer that a thread will need: on their way while it waits for the kernel before this one.
template <class... Vectors>
BNEXPORT_DEVICE void fetch_ahead(int64_t index, int64_t bytes, const Vectors*... vectors) {
  ((vectors != nullptr ? fetch(reinterpret_cast<const unsigned char*>(vectors) + index * bytes) : void()), ...);
}

template <class Args>
BNEXPORT_DEVICE void write_row(const Args& args, int64_t c, double first, double second) {
  if (c == 0) args.row[0] = row_weight(args.params.stats_mode, args.params.N, args.params.S);
  if (c >= args.params.C) return;
  args.row[1 + c] = first;
  args.row[1 + args.params.C + c] = second;
}

BNEXPORT_KERNEL forward_channels(BNEXPORT_ARGUMENTS ForwardArguments args) {
  start_next();
  const bnexport_forward& params = args.params;
  const int64_t c = int64_t{block_index()} * args.side_by_side + thread_index() % args.side_by_side;
  if (args.row == nullptr && c < params.C && thread_index() < args.side_by_side) {
    fetch_ahead(c, params.stats_dtype == BNEXPORT_FLOAT64 ? 8 : 4, params.weight, params.bias, params.running_mean,
                params.running_var);
  }
  wait_for_previous();
  Moments moments;
  if (args.partials != nullptr) {
    // Of the first part, as near to the channel's mean as any.
    const double pivot = c < params.C ? load_result(args.partials + c).mean : 0;
    moments = sum_of_parts<PartSums>(args, c, [&](PartSums& sums, const Moments& part) {
                sums.add(part, pivot);
              }).moments(pivot);
  }
  if (thread_index() >= args.side_by_side) return;
  if (args.row != nullptr) return write_row(args, c, moments.mean, row_spread(params.stats_mode, moments));
  if (c >= params.C) return;
  if (!params.training) {
    args.coefficients[c] = finish_inference(params, c);
  } else {
    args.coefficients[c] =
        finish_training(params, c, params.group_size > 1 ? gathered_statistics(params, c) : local_statistics(moments));
  }
}

BNEXPORT_KERNEL backward_channels(BNEXPORT_ARGUMENTS BackwardArguments args) {
  start_next();
  wait_for_previous();
  const bnexport_backward& params = args.params;
  const int64_t c = int64_t{block_index()} * args.side_by_side + thread_index() % args.side_by_side;
  GradientSums sums;
  if (args.partials != nullptr) {
    sums = sum_of_parts<BlockSums>(args, c, [](BlockSums& sums, const GradientSums& part) { sums.merge({part}); });
  }
  if (thread_index() >= args.side_by_side) return;
  if (args.row != nullptr) return write_row(args, c, sums.dy, sums.dy_x_hat);
  if (c >= params.C) return;
  if (params.group_size > 1) sums = {params.local_moments[1 + c], params.local_moments[1 + params.C + c]};
  const BackwardCoefficients k = finish_backward(params, c, sums, params.training ? group_share(params) : GroupShare{});
  if (params.training) {
    args.coefficients[c] = k;
  } else {  // dx = scale * dy, by the forward's kernel
    reinterpret_cast<ForwardCoefficients*>(args.coefficients)[c] = {0, k.scale, 0};
  }
}

// The forward's statistics as the backward reads them.
BNEXPORT_DEVICE double saved_mean(const bnexport_backward& params, int64_t c) {
  return load_statistic(params.saved_mean, saved_dtype(params), c, 0);
}
BNEXPORT_DEVICE double saved_invstd(const bnexport_backward& params, int64_t c) {
  return load_statistic(params.saved_invstd, saved_dtype(params), c, 0);
}

}  // namespace bnexport::cuda
