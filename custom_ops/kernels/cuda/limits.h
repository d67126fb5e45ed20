// Limits shared by the plan and the kernels; kernels check their own types against them.
#pragma once

#include <cstdint>

namespace bnexport::cuda {

// Threads of a block (launch bounds).
constexpr int kSplitBlockThreads = 256;
constexpr int kForwardClusterThreads = 448;   // at most; twice on a multiprocessor: 72 registers
constexpr int kBackwardClusterThreads = 320;  // at most; twice: 96 registers, for twice as many loads in flight
constexpr int kPersistentBlockThreads = 320;  // twice: 96 registers
constexpr int kPersistentBlocks = 2;          // on a multiprocessor, all at once
constexpr int kTeamThreads = 512;             // of a multiprocessor: 128 registers, one block or two

// The first bytes of every block's shared memory, for exchanges; tensors come behind.
constexpr int64_t kScratchBytes = 1536;
constexpr int64_t kColumnValueBytes = 72;  // of what threads of a column exchange

// In the workspace.
constexpr int64_t kPartBytes = 24;         // moments or sums of a part
constexpr int64_t kCoefficientBytes = 40;  // of a channel

}  // namespace bnexport::cuda
