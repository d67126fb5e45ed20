// How a tensor is shared out among a device's multiprocessors: a pure function of the tensor's shape and
// type and of the device's properties. No CUDA call, so every plan can be tested without a GPU.
#pragma once

#include <cstdint>

namespace bnexport::cuda {

// See forward_kernels.h. The values are those of bnexport_cuda.h.
enum class Strategy : int32_t { kAutomatic = 0, kCluster = 1, kPersistent = 2, kSplit = 3 };

struct DeviceProperties {
  int64_t multiprocessors = 1;
  int64_t shared_per_block = 49152;  // at most, once a kernel has asked for it
  int64_t shared_per_multiprocessor = 65536;
  int64_t shared_reserved = 0;  // by the system, of each block
  int64_t l2_bytes = 0;
  int64_t largest_cluster = 1;  // 1: none; 8: portable; 16: this device holds some
};

struct Problem {
  int64_t N = 0, C = 0, S = 0;
  int32_t dtype = 0;       // bnexport_dtype
  int32_t layout = 0;      // bnexport_layout
  int64_t tensors = 1;     // that are read for the output: x, or x and dy
  bool aligned = true;     // every tensor starts at a multiple of 16 bytes
  bool one_launch = true;  // statistics and output in one go: training, no group, and an output is wanted
};

// What a caller asks for instead of the plan's own choice; for measurements and tests. 0: no wish.
struct Wish {
  Strategy strategy = Strategy::kAutomatic;
  int64_t cluster = 0;
};

struct LaunchPlan {
  Strategy strategy = Strategy::kAutomatic;  // kAutomatic: the wish cannot be granted
  bool columns = false;                      // the tensor is a matrix of N * S rows; else rows of S values
  int64_t width = 1;                         // elements of a vector
  bool whole = true;                         // rows consist of whole vectors

  // Statistics and output: `blocks` of `threads`, with `shared` bytes. Split: both passes alike.
  int64_t blocks = 0, threads = 0, shared = 0;
  int64_t cluster = 1;  // blocks that share a channel and exchange through shared memory
  int64_t teams = 0;    // persistent: channels in work at a time

  int64_t parts = 1;             // blocks that share a channel (rows) or a tile of channels (columns)
  int64_t part_length = 0;       // rows: vectors of a part; columns: matrix rows of a part
  int64_t lanes = 1, tiles = 0;  // columns: threads side by side, blocks side by side
  int64_t kept_at = 0;           // columns, persistent: where shared memory holds the part

  bool stream = false;  // the output would push everything else out of L2

  // The workspace: partial results, coefficients, arrival counters, each from a multiple of 256 bytes.
  int64_t partials_at = 0, coefficients_at = 0, arrivals_at = 0, workspace = 0;
};

// Limits of the plan: C below 2^31, S at most 2^30, and N * C * S below 2^60.
constexpr int64_t kMostChannels = (int64_t{1} << 31) - 1;
constexpr int64_t kLongestRow = int64_t{1} << 30;

LaunchPlan launch_plan(const Problem& problem, const DeviceProperties& device, const Wish& wish = {});

}  // namespace bnexport::cuda
