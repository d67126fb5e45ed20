// How a tensor is shared out among a device's multiprocessors: a pure function of the tensor's shape and
// type and of the device. No CUDA call, so every plan can be tested without a GPU.
#pragma once

#include <cstdint>

namespace bnexport::cuda {

constexpr int kThreads = 256;  // of every block
constexpr int kBlocks = 4;     // that a multiprocessor holds at the same time: 64 registers a thread

struct Problem {
  int64_t N = 0, C = 0, S = 0;
  int32_t dtype = 0;    // bnexport_dtype
  int32_t layout = 0;   // bnexport_layout
  bool aligned = true;  // every tensor starts at a multiple of 16 bytes
};

// Of the kernels that read and write tensors, in both directions.
struct LaunchPlan {
  bool columns = false;  // the tensor is a matrix of N * S rows; else rows of S values
  int64_t width = 1;     // elements of a vector
  bool whole = true;     // rows consist of whole vectors
  int64_t blocks = 0;
  int64_t parts = 0;             // blocks that share a channel (rows) or a tile of channels (columns)
  int64_t part_length = 0;       // rows: vectors of a part; columns: matrix rows of a part
  int64_t lanes = 1, tiles = 0;  // columns: threads side by side, blocks side by side
  int64_t side_by_side = 1;      // channels of a block that adds up parts

  // The workspace: partial results, then coefficients from a multiple of 256 bytes on.
  int64_t coefficients_at = 0, workspace = 0;
};

// Limits of the plan: C below 2^31, S at most 2^30, and N * C * S below 2^60.
constexpr int64_t kMostChannels = (int64_t{1} << 31) - 1;
constexpr int64_t kLongestRow = int64_t{1} << 30;

LaunchPlan launch_plan(const Problem& problem, int64_t multiprocessors);

}  // namespace bnexport::cuda
