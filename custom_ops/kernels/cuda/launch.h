// Launches of a plan: select the kernels for the element type and fill in their arguments.
//
// A Launcher has void launch(Kernel kernel, int64_t blocks, const Arguments& arguments), in stream order: kernels.cu
// has CUDA's, the tests one that runs kernels on the host.
#pragma once

#include "launch_plan.h"
#include "tensor_kernels.h"

namespace bnexport::cuda {

template <class Args, class Params>
Args arguments_of(const Params& params, const LaunchPlan& plan, void* workspace) {
  Args args;
  args.params = params;
  if (!plan.columns) args.rows = Rows(params.N, params.C, params.S, plan.width);
  args.tiles = static_cast<int>(plan.tiles);
  args.lanes = static_cast<int>(plan.lanes);
  args.parts = static_cast<int>(plan.parts);
  args.part_length = plan.part_length;
  auto* bytes = static_cast<unsigned char*>(workspace);
  args.tickets = reinterpret_cast<uint32_t*>(bytes);
  args.partials = reinterpret_cast<Pair*>(bytes + plan.partials_at);
  args.coefficients = reinterpret_cast<decltype(args.coefficients)>(bytes + plan.coefficients_at);
  args.scales = reinterpret_cast<ForwardCoefficients*>(args.coefficients);
  return args;
}

template <class T, int V, class Body>
void with_vectors_of(const LaunchPlan& plan, const Body& body) {
  if (plan.width == 1) {
    body(Vector<T, 1>{});
  } else if (plan.whole) {
    body(Vector<T, V>{});
  } else {
    body(Vector<T, V, false>{});
  }
}

// body(E{}) for the vector type of a plan.
template <class Body>
void with_vectors(int32_t dtype, const LaunchPlan& plan, const Body& body) {
  switch (dtype) {
    case BNEXPORT_FLOAT64: return body(Vector<Float64, 1>{});
    case BNEXPORT_FLOAT32: return with_vectors_of<Float32, 4>(plan, body);
    case BNEXPORT_FLOAT16: return with_vectors_of<Float16, 8>(plan, body);
    default: return with_vectors_of<Bfloat16, 8>(plan, body);
  }
}

// body(Place{}) for the kind of vectors and places of a plan, as a type in a value.
template <class Place>
struct Type {
  using type = Place;
};
template <class Body>
void with_places(int32_t dtype, const LaunchPlan& plan, const Body& body) {
  with_vectors(dtype, plan, [&](auto vector) {
    using E = decltype(vector);
    if constexpr (E::kWhole) {
      if (plan.columns) return body(Type<ColumnPlace<E>>{});
    }
    body(Type<RowPlace<E>>{});
  });
}
#define BNEXPORT_LAUNCH(kernel, args)                   \
  with_places(args.params.dtype, plan, [&](auto type) { \
    using Place = typename decltype(type)::type;        \
    launcher.launch(kernel<Place>, plan.blocks, args);  \
  })

inline int64_t channel_blocks(int64_t C) { return C > kThreads ? (C + kThreads - 1) / kThreads : 1; }

// This process's row of 2 C + 1 doubles.
template <class Launcher>
void run_moments(const bnexport_forward& params, const LaunchPlan& plan, void* workspace, double* row,
                 Launcher& launcher) {
  auto args = arguments_of<ForwardArguments>(params, plan, workspace);
  args.row = row;
  if (plan.blocks == 0) return launcher.launch(forward_channels, channel_blocks(params.C), args);
  BNEXPORT_LAUNCH(moments, args);
}

template <class Launcher>
void run_forward(const bnexport_forward& params, const LaunchPlan& plan, void* workspace, Launcher& launcher) {
  const auto args = arguments_of<ForwardArguments>(params, plan, workspace);
  if (params.C == 0) return;
  if (params.training && params.group_size == 1 && plan.blocks > 0) {
    BNEXPORT_LAUNCH(moments, args);
  } else {
    launcher.launch(forward_channels, channel_blocks(params.C), args);
  }
  if (plan.blocks > 0) BNEXPORT_LAUNCH(normalise, args);
}

template <class Launcher>
void run_backward_moments(const bnexport_backward& params, const LaunchPlan& plan, void* workspace, double* row,
                          Launcher& launcher) {
  auto args = arguments_of<BackwardArguments>(params, plan, workspace);
  args.row = row;
  if (plan.blocks == 0) return launcher.launch(backward_channels, channel_blocks(params.C), args);
  BNEXPORT_LAUNCH(sums, args);
}

// With fixed statistics dx = scale * dy: the normalising kernel of the forward, and x is not read.
template <class Launcher>
void launch_scaling(const BackwardArguments& from, const LaunchPlan& plan, Launcher& launcher) {
  ForwardArguments args{};
  args.params.dtype = from.params.dtype;
  args.params.x = from.params.dy;
  args.params.y = from.params.dx;
  args.params.N = from.params.N;
  args.params.C = from.params.C;
  args.params.S = from.params.S;
  args.rows = from.rows;
  args.parts = from.parts;
  args.part_length = from.part_length;
  args.tiles = from.tiles;
  args.lanes = from.lanes;
  args.coefficients = from.scales;
  BNEXPORT_LAUNCH(normalise, args);
}

template <class Launcher>
void run_backward(const bnexport_backward& params, const LaunchPlan& plan, void* workspace, Launcher& launcher) {
  const auto args = arguments_of<BackwardArguments>(params, plan, workspace);
  if (params.C == 0) return;
  const bool gradients = params.dweight != nullptr || params.dbias != nullptr;
  const bool needs_sums = gradients || (params.training && params.dx != nullptr);
  if (params.group_size == 1 && needs_sums && plan.blocks > 0) {
    BNEXPORT_LAUNCH(sums, args);
  } else {
    launcher.launch(backward_channels, channel_blocks(params.C), args);
  }
  if (plan.blocks == 0 || params.dx == nullptr) return;
  if (!params.training) return launch_scaling(args, plan, launcher);
  BNEXPORT_LAUNCH(gradient, args);
}

}  // namespace bnexport::cuda
