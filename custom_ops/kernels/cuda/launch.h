// Launches of a plan: select the kernels for the element type and fill in their arguments.
//
// A Launcher has void launch(Kernel kernel, int64_t blocks, const Arguments& arguments, bool overlaps), in stream
// order: kernels.cu has CUDA's, the tests one that runs kernels on the host. overlaps: the kernel calls
// wait_for_previous().
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
  args.side_by_side = static_cast<int>(plan.side_by_side);
  auto* bytes = static_cast<unsigned char*>(workspace);
  if (plan.blocks > 0) args.partials = reinterpret_cast<decltype(args.partials)>(bytes);
  args.coefficients = reinterpret_cast<decltype(args.coefficients)>(bytes + plan.coefficients_at);
  return args;
}

template <class Place>
struct Type {
  using type = Place;
};
template <class T, int V, class Body>
void with_places_of(const LaunchPlan& plan, const Body& body) {
  if constexpr (V > 1) {
    if (plan.width > 1 && plan.columns) return body(Type<ColumnPlace<Vector<T, 4>>>{});
    if (plan.width > 1 && plan.whole) return body(Type<RowPlace<Vector<T, V>>>{});
    if (plan.width > 1) return body(Type<RowPlace<Vector<T, V, false>>>{});
  }
  plan.columns ? body(Type<ColumnPlace<Vector<T, 1>>>{}) : body(Type<RowPlace<Vector<T, 1>>>{});
}
// body(Type<Place>{}) for the kind of vectors and places of a plan.
template <class Body>
void with_places(int32_t dtype, const LaunchPlan& plan, const Body& body) {
  switch (dtype) {
    case BNEXPORT_FLOAT64: return with_places_of<Float64, 1>(plan, body);
    case BNEXPORT_FLOAT32: return with_places_of<Float32, 4>(plan, body);
    case BNEXPORT_FLOAT16: return with_places_of<Float16, 8>(plan, body);
    default: return with_places_of<Bfloat16, 8>(plan, body);
  }
}
#define BNEXPORT_LAUNCH(kernel, args, overlaps)                  \
  with_places(args.params.dtype, plan, [&](auto type) {          \
    using Place = typename decltype(type)::type;                 \
    launcher.launch(kernel<Place>, plan.blocks, args, overlaps); \
  })

template <class Launcher, class Kernel, class Args>
void launch_channels(Launcher& launcher, const Kernel& kernel, const Args& args) {
  const int64_t C = args.params.C, blocks = (C + args.side_by_side - 1) / args.side_by_side;
  if (args.row != nullptr || C > 0) launcher.launch(kernel, blocks > 0 ? blocks : 1, args, true);
}

// Statistics and output, or, with `row`, this process's 2 C + 1 doubles of them.
template <class Launcher>
void run_forward(const bnexport_forward& params, const LaunchPlan& plan, void* workspace, Launcher&& launcher,
                 double* row = nullptr) {
  auto args = arguments_of<ForwardArguments>(params, plan, workspace);
  args.row = row;
  if (row == nullptr && (!params.training || params.group_size > 1)) args.partials = nullptr;  // statistics are known
  if (args.partials != nullptr) BNEXPORT_LAUNCH(moments, args, false);
  launch_channels(launcher, forward_channels, args);
  if (row == nullptr && plan.blocks > 0) BNEXPORT_LAUNCH(normalise, args, true);
}

template <class Launcher>
void run_backward(const bnexport_backward& params, const LaunchPlan& plan, void* workspace, Launcher&& launcher,
                  double* row = nullptr) {
  auto args = arguments_of<BackwardArguments>(params, plan, workspace);
  args.row = row;
  const bool gradients = params.dweight != nullptr || params.dbias != nullptr;
  const bool needs_sums = gradients || (params.training && params.dx != nullptr);
  if (row == nullptr && (params.group_size > 1 || !needs_sums)) args.partials = nullptr;
  if (args.partials != nullptr) BNEXPORT_LAUNCH(sums, args, false);
  launch_channels(launcher, backward_channels, args);
  if (row != nullptr || plan.blocks == 0 || params.dx == nullptr) return;
  if (params.training) {
    BNEXPORT_LAUNCH(gradient, args, true);
    return;
  }
  // Fixed statistics: dx = scale * dy by the forward's kernel, and x is not read.
  bnexport_forward scaling{};
  scaling.dtype = params.dtype;
  scaling.N = params.N;
  scaling.C = params.C;
  scaling.S = params.S;
  scaling.x = params.dy;
  scaling.y = params.dx;
  const auto scaled = arguments_of<ForwardArguments>(scaling, plan, workspace);
  BNEXPORT_LAUNCH(normalise, scaled, true);
}

}  // namespace bnexport::cuda
