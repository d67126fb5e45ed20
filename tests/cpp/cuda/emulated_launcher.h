// Launches kernels on the emulated device, in a new random order each time.
#pragma once

#include "../../../custom_ops/kernels/cuda/launch.h"

namespace bnexport::cuda {

struct EmulatedLauncher {
  uint32_t seed = 1;

  template <class Arguments>
  void launch(void (*kernel)(Arguments), int64_t blocks, const Arguments& arguments, bool) {
    emulator::run(blocks, kSharedBytes, seed++, [&] { kernel(arguments); });
  }
};

}  // namespace bnexport::cuda
