// A node's attributes and tensors as the kernels' parameters: the same for every provider.
#pragma once

#include "../node.h"
#include "bnexport.h"

namespace bnexport::adapters {

// saved_mean and saved_invstd of the params, and what is gathered, are left to the provider: kernels
// work on doubles, the node's tensors have type S.
struct ForwardBinding {
  explicit ForwardBinding(const Run& run);
  bnexport_forward params{};
  void *saved_mean, *saved_invstd;  // outputs; null when the node does not have them
  bool exchanges;                   // whether the group is needed
};

struct BackwardBinding {
  explicit BackwardBinding(const Run& run);
  bnexport_backward params{};
  const void *saved_mean, *saved_invstd;
  bool exchanges;
};

}  // namespace bnexport::adapters
