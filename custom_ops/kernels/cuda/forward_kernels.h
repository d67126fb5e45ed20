// Forward kernels, three ways to read x:
//
//   split       moments | channels | normalise: three launches, around a collective where there is one
//   cluster     a cluster of blocks per channel keeps the slab in shared memory: one read, one launch
//   persistent  teams of blocks take a channel each, so few that what they read is still in L2 when
//               they read it again: one launch
//
// They are the same three steps put together in different ways (slab.h, columns.h).
#pragma once

#include "../common/statistics_definitions.h"
#include "arguments.h"
#include "slab.h"

namespace bnexport::cuda {

template <class E>
BNEXPORT_DEVICE const typename E::Storage* input_of(const bnexport_forward& params) {
  return static_cast<const typename E::Storage*>(params.x);
}
template <class E>
BNEXPORT_DEVICE typename E::Storage* output_of(const bnexport_forward& params) {
  return static_cast<typename E::Storage*>(params.y);
}

// --- split

template <class E>
BNEXPORT_KERNEL(kSplitBlockThreads, 4)
row_moments(BNEXPORT_ARGUMENTS ForwardArguments args) {
  const Split& split = args.split;
  const int c = block_index() / split.parts, part = block_index() % split.parts;
  const auto* x = input_of<E>(args.params);
  const Range range = part_of_slab(split.rows, c, part, split.part_length);
  const Moments all = block_moments<E>(split.rows, range, x, FromGlobal<E, Reuse::kSoon>{x});
  if (thread_index() == 0) args.partials[c * args.parts.channel_stride + part * args.parts.part_stride] = all;
}

template <class E>
BNEXPORT_KERNEL(kSplitBlockThreads, 2)
column_moments(BNEXPORT_ARGUMENTS ForwardArguments args) {
  const auto* x = input_of<E>(args.params);
  block_column_moments<E>(args.columns, x, RowsFromGlobal<E, Reuse::kSoon>{x}, block_index(), args.partials);
}

// A warp a channel: this process's row, or the statistics and coefficients of the group.
BNEXPORT_KERNEL(kSplitBlockThreads, 2) forward_channels(BNEXPORT_ARGUMENTS ForwardArguments args) {
  const bnexport_forward& params = args.params;
  const int64_t c = (int64_t{block_index()} * thread_count() + thread_index()) / kWarp;
  const bool leader = thread_index() % kWarp == 0;
  if (args.row != nullptr && block_index() == 0 && thread_index() == 0) {
    args.row[0] = row_weight(params.stats_mode, params.N, params.S);
  }
  if (c >= params.C) return;
  const bool local = args.row != nullptr || (params.training && params.group_size == 1);
  Moments moments;
  if (local) {
    moments =
        merge_parts(args.partials + c * args.parts.channel_stride, args.parts.count, args.parts.part_stride, Moments{});
  }
  if (!leader) return;
  if (args.row != nullptr) {
    args.row[1 + c] = moments.mean;
    args.row[1 + params.C + c] = row_spread(params.stats_mode, moments);
  } else if (!params.training) {
    args.coefficients[c] = finish_inference(params, c);
  } else {
    args.coefficients[c] =
        finish_training(params, c, local ? local_statistics(moments) : gathered_statistics(params, c));
  }
}

// The last part first: the statistics left it in L2.
template <class E>
BNEXPORT_KERNEL(kSplitBlockThreads, 4)
row_normalise(BNEXPORT_ARGUMENTS ForwardArguments args) {
  const Split& split = args.split;
  const int block = block_count() - 1 - block_index();
  const int c = block / split.parts, part = block % split.parts;
  const auto* x = input_of<E>(args.params);
  block_normalise<E>(split.rows, part_of_slab(split.rows, c, part, split.part_length), FromGlobal<E, Reuse::kNever>{x},
                     output_of<E>(args.params), args.coefficients[c], split.stream);
}

template <class E>
BNEXPORT_KERNEL(kSplitBlockThreads, 2)
column_normalise(BNEXPORT_ARGUMENTS ForwardArguments args) {
  block_column_normalise<E>(args.columns, RowsFromGlobal<E, Reuse::kNever>{input_of<E>(args.params)},
                            output_of<E>(args.params), args.coefficients, block_count() - 1 - block_index(),
                            args.split.stream);
}

// --- in one launch

// What thread 0 will read of a channel when its moments are known: 0.5 us from memory, hidden behind the
// reading of x.
BNEXPORT_DEVICE const void* statistic_at(const void* values, int32_t dtype, int64_t c) {
  if (values == nullptr) return nullptr;
  return static_cast<const unsigned char*>(values) + c * (dtype == BNEXPORT_FLOAT64 ? 8 : 4);
}
BNEXPORT_DEVICE void prefetch_channel(const bnexport_forward& params, int64_t c) {
  if (thread_index() != 0) return;
  prefetch(statistic_at(params.weight, params.stats_dtype, c));
  prefetch(statistic_at(params.bias, params.stats_dtype, c));
  prefetch(statistic_at(params.running_mean, params.stats_dtype, c));
  prefetch(statistic_at(params.running_var, params.stats_dtype, c));
}

// Thread 0 turns the channel's moments into coefficients; one block of all that share the channel also
// writes its statistics.
BNEXPORT_DEVICE ForwardCoefficients finish_channel(const bnexport_forward& params, int64_t c, const Moments& moments,
                                                   bool writes) {
  ForwardCoefficients k{};
  if (thread_index() == 0) {
    const GroupStatistics statistics = local_statistics(moments);
    if (writes) {
      k = finish_training(params, c, statistics);
    } else {
      k = training_coefficients(params, c, statistics);
    }
  }
  return broadcast(k);
}

template <class E>
BNEXPORT_KERNEL(kForwardClusterThreads, 2)
cluster_forward(BNEXPORT_ARGUMENTS ForwardArguments args) {
  if (cluster_size() > 1) cluster_arrive();
  const Split& split = args.split;
  const int c = block_index() / split.parts;
  prefetch_channel(args.params, c);
  const auto* x = input_of<E>(args.params);
  const Range range = part_of_slab(split.rows, c, cluster_rank(), split.part_length);
  const Keeping<E> keeping{x, reinterpret_cast<typename E::Raw*>(shared_memory() + kScratchBytes), range.begin};
  const Moments mine = block_moments<E>(split.rows, range, x, keeping);
  const Moments all = merge_cluster(mine, Moments{});
  const ForwardCoefficients k = finish_channel(args.params, c, all, cluster_rank() == 0);
  block_normalise<E>(split.rows, range, Kept<E>(keeping), output_of<E>(args.params), k, split.stream);
}

// Team t takes channels t, t + teams, ..; its blocks are t, t + teams, .. and take a part each. What
// they exchange lies in one of two sets of slots in turn: nobody can be two channels ahead.
template <class Value>
BNEXPORT_DEVICE Value merge_team(const Split& split, const Value& mine, Value* slots, uint32_t* arrivals, int round,
                                 const Value& none) {
  const int team = block_index() % split.teams, member = block_index() / split.teams;
  Value* set = slots + (round % 2 * split.teams + team) * split.parts;
  if (thread_index() == 0) {
    set[member] = mine;
    signal(arrivals + team);
    await(arrivals + team, static_cast<uint32_t>(round + 1) * static_cast<uint32_t>(split.parts));
  }
  sync_block();
  return thread_index() < kWarp ? merge_parts(set, split.parts, 1, none) : none;
}

template <class E>
BNEXPORT_KERNEL(kPersistentBlockThreads, kPersistentBlocks)
persistent_forward(BNEXPORT_ARGUMENTS ForwardArguments args) {
  const Split& split = args.split;
  const auto* x = input_of<E>(args.params);
  const int team = block_index() % split.teams, member = block_index() / split.teams;
  for (int c = team, round = 0; c < split.rows.C; c += split.teams, ++round) {
    prefetch_channel(args.params, c);
    const Range range = part_of_slab(split.rows, c, member, split.part_length);
    const Moments mine = block_moments<E>(split.rows, range, x, FromGlobal<E, Reuse::kSoon>{x});
    const Moments all = merge_team(split, mine, args.partials, args.arrivals, round, Moments{});
    const ForwardCoefficients k = finish_channel(args.params, c, all, member == 0);
    block_normalise<E>(split.rows, range, FromGlobal<E, Reuse::kNever>{x}, output_of<E>(args.params), k, split.stream);
  }
}

}  // namespace bnexport::cuda
