// Backward kernels, in the same three ways as forward_kernels.h.
#pragma once

#include "forward_kernels.h"

namespace bnexport::cuda {

template <class E>
struct BackwardData {
  const typename E::Storage *dy, *x;
  typename E::Storage* dx;

  BNEXPORT_DEVICE explicit BackwardData(const bnexport_backward& params)
      : dy(static_cast<const typename E::Storage*>(params.dy)),
        x(static_cast<const typename E::Storage*>(params.x)),
        dx(static_cast<typename E::Storage*>(params.dx)) {}
};

// --- split

template <class E>
BNEXPORT_KERNEL(kSplitBlockThreads, 3)
row_sums(BNEXPORT_ARGUMENTS BackwardArguments args) {
  using Source = FromGlobal<E, Reuse::kSoon>;
  const Split& split = args.split;
  const BackwardData<E> data(args.params);
  const int c = block_index() / split.parts, part = block_index() % split.parts;
  const Range range = part_of_slab(split.rows, c, part, split.part_length);
  const BlockSums all = block_sums<E>(split.rows, range, Source{data.dy}, Source{data.x}, args.params, c);
  if (thread_index() == 0) args.partials[c * args.parts.channel_stride + part * args.parts.part_stride] = all;
}

template <class E>
BNEXPORT_KERNEL(kSplitBlockThreads, 2)
column_sums(BNEXPORT_ARGUMENTS BackwardArguments args) {
  const BackwardData<E> data(args.params);
  using Source = RowsFromGlobal<E, Reuse::kSoon>;
  block_column_sums<E>(args.columns, Source{data.dy}, Source{data.x}, args.params, block_index(), args.partials);
}

// A warp a channel: this process's row, or the gradients of weight and bias and the coefficients of dx.
BNEXPORT_KERNEL(kSplitBlockThreads, 2) backward_channels(BNEXPORT_ARGUMENTS BackwardArguments args) {
  const bnexport_backward& params = args.params;
  const int64_t c = (int64_t{block_index()} * thread_count() + thread_index()) / kWarp;
  const bool leader = thread_index() % kWarp == 0;
  if (args.row != nullptr && block_index() == 0 && thread_index() == 0) {
    args.row[0] = row_weight(params.stats_mode, params.N, params.S);
  }
  if (c >= params.C) return;
  BlockSums sums;
  if (args.row != nullptr || params.group_size == 1) {
    sums = merge_parts(args.partials + c * args.parts.channel_stride, args.parts.count, args.parts.part_stride,
                       BlockSums{});
  } else {
    sums.dy = params.local_moments[1 + c];
    sums.dy_x_hat = params.local_moments[1 + params.C + c];
  }
  if (!leader) return;
  if (args.row != nullptr) {
    args.row[1 + c] = sums.dy;
    args.row[1 + params.C + c] = sums.dy_x_hat;
    return;
  }
  const GroupShare share = params.training ? group_share(params) : GroupShare{};
  const BackwardCoefficients k = finish_backward(params, c, sums, share);
  if (params.training) {
    args.coefficients[c] = k;
  } else {
    args.scales[c] = {0, k.scale, 0};
  }
}

template <class E>
BNEXPORT_KERNEL(kSplitBlockThreads, 3)
row_gradient(BNEXPORT_ARGUMENTS BackwardArguments args) {
  using Source = FromGlobal<E, Reuse::kNever>;
  const Split& split = args.split;
  const BackwardData<E> data(args.params);
  const int block = block_count() - 1 - block_index();
  const int c = block / split.parts, part = block % split.parts;
  block_gradient<E>(split.rows, part_of_slab(split.rows, c, part, split.part_length), Source{data.dy}, Source{data.x},
                    data.dx, args.coefficients[c], split.stream);
}

template <class E>
BNEXPORT_KERNEL(kSplitBlockThreads, 2)
column_gradient(BNEXPORT_ARGUMENTS BackwardArguments args) {
  const BackwardData<E> data(args.params);
  using Source = RowsFromGlobal<E, Reuse::kNever>;
  block_column_gradient<E>(args.columns, Source{data.dy}, Source{data.x}, data.dx, args.coefficients,
                           block_count() - 1 - block_index(), args.split.stream);
}

// --- in one launch

BNEXPORT_DEVICE void prefetch_channel(const bnexport_backward& params, int64_t c) {
  if (thread_index() == 0) prefetch(statistic_at(params.weight, params.stats_dtype, c));
}

BNEXPORT_DEVICE BackwardCoefficients finish_channel(const bnexport_backward& params, int64_t c, const BlockSums& sums,
                                                    bool writes) {
  BackwardCoefficients k{};
  if (thread_index() == 0) {
    if (writes) write_gradients(params, c, sums);
    k = backward_coefficients(params, c, sums, group_share(params));
  }
  return broadcast(k);
}

template <class E>
BNEXPORT_KERNEL(kBackwardClusterThreads, 2)
cluster_backward(BNEXPORT_ARGUMENTS BackwardArguments args) {
  if (cluster_size() > 1) cluster_arrive();
  const Split& split = args.split;
  const BackwardData<E> data(args.params);
  const int c = block_index() / split.parts;
  prefetch_channel(args.params, c);
  const Range range = part_of_slab(split.rows, c, cluster_rank(), split.part_length);
  auto* kept = reinterpret_cast<typename E::Raw*>(shared_memory() + kScratchBytes);
  const Keeping<E> dy{data.dy, kept, range.begin};
  const Keeping<E> x{data.x, kept + split.part_length, range.begin};
  const BlockSums mine = block_sums<E>(split.rows, range, dy, x, args.params, c);
  const BlockSums all = merge_cluster(mine, BlockSums{});
  const BackwardCoefficients k = finish_channel(args.params, c, all, cluster_rank() == 0);
  block_gradient<E>(split.rows, range, Kept<E>(dy), Kept<E>(x), data.dx, k, split.stream);
}

template <class E>
BNEXPORT_KERNEL(kPersistentBlockThreads, kPersistentBlocks)
persistent_backward(BNEXPORT_ARGUMENTS BackwardArguments args) {
  using First = FromGlobal<E, Reuse::kSoon>;
  using Second = FromGlobal<E, Reuse::kNever>;
  const Split& split = args.split;
  const BackwardData<E> data(args.params);
  const int team = block_index() % split.teams, member = block_index() / split.teams;
  for (int c = team, round = 0; c < split.rows.C; c += split.teams, ++round) {
    prefetch_channel(args.params, c);
    const Range range = part_of_slab(split.rows, c, member, split.part_length);
    const BlockSums mine = block_sums<E>(split.rows, range, First{data.dy}, First{data.x}, args.params, c);
    const BlockSums all = merge_team(split, mine, args.partials, args.arrivals, round, BlockSums{});
    const BackwardCoefficients k = finish_channel(args.params, c, all, member == 0);
    block_gradient<E>(split.rows, range, Second{data.dy}, Second{data.x}, data.dx, k, split.stream);
  }
}

}  // namespace bnexport::cuda
