// One read of a channels-last tensor: teams of blocks that all run at once take a tile of columns each, so narrow
// that its rows fit the team's shared memory.
//
//   moments of a block's rows, which stay in shared memory | meet | each channel's parts merged by one warp of
//   the team | meet | output from shared memory
//
// With two teams, one block of each on a multiprocessor, one loads while the other waits or stores. Where a tile is
// too large for half of the shared memory, one team has all of it, with twice the threads.
#pragma once

#include "backward_kernels.h"

namespace bnexport::cuda {

// A block's place. Blocks team, team + teams, .. are a team.
struct TeamPlace {
  int team, member, members;
  uint32_t* arrivals;  // two counters a team

  template <class Arguments>
  BNEXPORT_DEVICE explicit TeamPlace(const Arguments& args)
      : team(block_index() % args.split.teams),
        member(block_index() / args.split.teams),
        members(args.split.parts),
        arrivals(args.arrivals + 2 * team) {}

  // Waits until all blocks of the team are at this meeting of this round; what they wrote before is visible.
  BNEXPORT_DEVICE void meet(int which, int round) const {
    sync_block();
    if (thread_index() == 0) {
      signal(arrivals + which);
      await(arrivals + which, static_cast<uint32_t>(round + 1) * static_cast<uint32_t>(members));
    }
    sync_block();
  }
};

// Calls finish(c) in all lanes of one warp of the team for each channel of the tile.
template <class E, class Finish>
BNEXPORT_DEVICE void share_channels(const Columns& columns, const TeamPlace& place, int tile, const Finish& finish) {
  const int64_t first = static_cast<int64_t>(tile) * columns.lanes * E::kWidth;
  const int64_t end = first + columns.lanes * E::kWidth, last = end < columns.C ? end : columns.C;
  const int warp = thread_index() / kWarp, warps = thread_count() / kWarp;
  for (int64_t c = first + place.member + int64_t{warp} * place.members; c < last;
       c += int64_t{warps} * place.members) {
    finish(c);
  }
}

template <class E>
BNEXPORT_KERNEL(kTeamThreads, 1)
team_forward(BNEXPORT_ARGUMENTS ForwardArguments args) {
  const Columns& columns = args.columns;
  const TeamPlace place(args);
  const auto* x = input_of<E>(args.params);
  auto* kept = reinterpret_cast<typename E::Raw*>(shared_memory() + columns.kept_at);
  for (int tile = place.team, round = 0; tile < columns.tiles; tile += args.split.teams, ++round) {
    const int block = place.member * columns.tiles + tile;
    block_column_moments<E>(columns, x, RowsKeeping<E>{x, kept}, block, args.partials);
    place.meet(0, round);
    share_channels<E>(columns, place, tile, [&](int64_t c) {
      const Moments all = merge_parts(args.partials + c, place.members, columns.C, Moments{});
      if (thread_index() % kWarp == 0) {
        args.coefficients[c] = finish_training(args.params, c, local_statistics(all));
      }
    });
    place.meet(1, round);
    block_column_normalise<E>(columns, RowsKept<E>{kept}, output_of<E>(args.params), args.coefficients, block,
                              args.split.stream);
  }
}

template <class E>
BNEXPORT_KERNEL(kTeamThreads, 1)
team_backward(BNEXPORT_ARGUMENTS BackwardArguments args) {
  const Columns& columns = args.columns;
  const TeamPlace place(args);
  const BackwardData<E> data(args.params);
  auto* kept = reinterpret_cast<typename E::Raw*>(shared_memory() + columns.kept_at);
  auto* kept_x = kept + columns.part_rows * columns.lanes;
  for (int tile = place.team, round = 0; tile < columns.tiles; tile += args.split.teams, ++round) {
    const int block = place.member * columns.tiles + tile;
    block_column_sums<E>(columns, RowsKeeping<E>{data.dy, kept}, RowsKeeping<E>{data.x, kept_x}, args.params, block,
                         args.partials);
    place.meet(0, round);
    share_channels<E>(columns, place, tile, [&](int64_t c) {
      const BlockSums all = merge_parts(args.partials + c, place.members, columns.C, BlockSums{});
      if (thread_index() % kWarp == 0) {
        args.coefficients[c] = finish_backward(args.params, c, all, group_share(args.params));
      }
    });
    place.meet(1, round);
    block_column_gradient<E>(columns, RowsKept<E>{kept}, RowsKept<E>{kept_x}, data.dx, args.coefficients, block,
                             args.split.stream);
  }
}

}  // namespace bnexport::cuda
