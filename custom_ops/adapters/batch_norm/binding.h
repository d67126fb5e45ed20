// A node's attributes and tensors as the kernels' parameters, validated: the same for every provider.
#pragma once

#include "../node.h"
#include "bnexport.h"

namespace bnexport::adapters {

// The attributes of a node, read and checked once when the session is built.
struct Attributes {
  std::string node;
  std::string group;
  int64_t group_size = 1;
  double momentum = 0, eps = 0;
  int32_t training = 1, stats_mode = 0, grad_reduction = 0;
};
Attributes read_attributes(const AttributeReader& read);

// saved_mean and saved_invstd of the params, and what is gathered, are left to the provider: kernels
// work on doubles, the node's tensors have type S.
struct ForwardBinding {
  bnexport_forward params{};
  void* saved_mean = nullptr;  // outputs; null when the node does not have them
  void* saved_invstd = nullptr;
};
ForwardBinding bind_forward(const Run& run, const Attributes& attributes, int32_t dtype, int32_t stats_dtype);

struct BackwardBinding {
  bnexport_backward params{};
  const void* saved_mean = nullptr;
  const void* saved_invstd = nullptr;
  bool exchanges = false;  // whether the group is needed
};
BackwardBinding bind_backward(const Run& run, const schema::Operator& op, const Attributes& attributes, int32_t dtype,
                              int32_t stats_dtype);

}  // namespace bnexport::adapters
