// Launches kernels on the emulated device, in a new random order each time.
#pragma once

#include <cstring>

#include "../../../custom_ops/kernels/cuda/launch.h"

namespace bnexport::cuda {

struct EmulatedLauncher {
  uint32_t seed = 1;
  int64_t launches = 0;

  template <class Kernel, class Arguments>
  void launch(Kernel kernel, const Launch& launch, const Arguments& arguments) {
    ++launches;
    emulator::run({launch.blocks, launch.threads, launch.shared, launch.cluster, launch.cooperative}, seed++,
                  [&] { kernel(arguments); });
  }
  void zero(void* memory, int64_t bytes) { std::memset(memory, 0, static_cast<size_t>(bytes)); }
};

}  // namespace bnexport::cuda
