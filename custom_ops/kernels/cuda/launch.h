// Launches of a plan: select the kernels for the element type and fill in their arguments.
//
// A Launcher has
//   void launch(Kernel kernel, const Launch& launch, const Arguments& arguments)
//   void zero(void* memory, int64_t bytes)
// in stream order; CUDA's is in stream.h, the tests have one that runs kernels on the host.
#pragma once

#include "backward_kernels.h"
#include "forward_kernels.h"
#include "launch_plan.h"
#include "team_columns.h"

namespace bnexport::cuda {

struct Launch {
  int64_t blocks = 1, threads = 1, shared = 0, cluster = 1;
  bool cooperative = false;  // all blocks run at the same time
};

// Counters of persistent kernels: one a team, two where columns are shared out.
inline int64_t arrival_bytes(const LaunchPlan& plan) { return plan.teams * (plan.columns ? 8 : 4); }

// One launch of each kind of kernel that a pass consists of.
inline Launch main_launch(const LaunchPlan& plan) {
  return {plan.blocks, plan.threads, plan.shared, plan.cluster, plan.strategy == Strategy::kPersistent};
}
inline Launch channel_launch(int64_t C) {
  constexpr int64_t kChannels = kSplitBlockThreads / kWarp;
  return {C > 0 ? (C + kChannels - 1) / kChannels : 1, kSplitBlockThreads, 0, 1, false};
}

template <class Arguments, class Params>
Arguments arguments_of(const Params& params, const LaunchPlan& plan, void* workspace) {
  Arguments args;
  args.params = params;
  if (plan.columns) {
    args.columns = {params.N * params.S,
                    params.C,
                    plan.part_length,
                    static_cast<int>(plan.tiles),
                    static_cast<int>(plan.lanes),
                    static_cast<int>(plan.kept_at)};
    args.parts = {plan.parts, 1, params.C};
  } else {
    args.split.rows = Rows(params.N, params.C, params.S, plan.width);
    args.parts = {plan.parts, plan.parts, 1};
  }
  if (plan.blocks == 0) args.parts.count = 0;  // no data
  args.split.parts = static_cast<int>(plan.parts);
  args.split.part_length = plan.part_length;
  args.split.teams = static_cast<int>(plan.teams);
  args.split.stream = plan.stream;
  auto* bytes = static_cast<unsigned char*>(workspace);
  args.partials = reinterpret_cast<decltype(args.partials)>(bytes + plan.partials_at);
  args.coefficients = reinterpret_cast<decltype(args.coefficients)>(bytes + plan.coefficients_at);
  args.arrivals = reinterpret_cast<uint32_t*>(bytes + plan.arrivals_at);
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

// Kernels in one launch exist for 16-byte vectors alone.
template <class E>
constexpr bool kHasFused = E::kWidth > 1;

template <class Launcher>
void launch_moments(const ForwardArguments& args, const LaunchPlan& plan, Launcher& launcher) {
  if (plan.blocks == 0) return;
  with_vectors(args.params.dtype, plan, [&](auto vector) {
    using E = decltype(vector);
    if constexpr (E::kWhole) {
      if (plan.columns) return launcher.launch(column_moments<E>, main_launch(plan), args);
    }
    launcher.launch(row_moments<E>, main_launch(plan), args);
  });
}

// This process's row of 2 C + 1 doubles.
template <class Launcher>
void run_moments(const bnexport_forward& params, const LaunchPlan& plan, void* workspace, double* row,
                 Launcher& launcher) {
  auto args = arguments_of<ForwardArguments>(params, plan, workspace);
  args.row = row;
  launch_moments(args, plan, launcher);
  launcher.launch(forward_channels, channel_launch(params.C), args);
}

template <class Launcher>
void run_forward(const bnexport_forward& params, const LaunchPlan& plan, void* workspace, Launcher& launcher) {
  const auto args = arguments_of<ForwardArguments>(params, plan, workspace);
  if (plan.strategy == Strategy::kSplit) {
    if (params.C == 0) return;
    if (params.training && params.group_size == 1) launch_moments(args, plan, launcher);
    launcher.launch(forward_channels, channel_launch(params.C), args);
    if (plan.blocks == 0) return;
    with_vectors(params.dtype, plan, [&](auto vector) {
      using E = decltype(vector);
      if constexpr (E::kWhole) {
        if (plan.columns) return launcher.launch(column_normalise<E>, main_launch(plan), args);
      }
      launcher.launch(row_normalise<E>, main_launch(plan), args);
    });
    return;
  }
  if (plan.strategy == Strategy::kPersistent) launcher.zero(args.arrivals, arrival_bytes(plan));
  with_vectors(params.dtype, plan, [&](auto vector) {
    using E = decltype(vector);
    if constexpr (kHasFused<E>) {
      if constexpr (E::kWhole) {
        if (plan.columns) return launcher.launch(team_forward<E>, main_launch(plan), args);
      }
      launcher.launch(plan.strategy == Strategy::kCluster ? cluster_forward<E> : persistent_forward<E>,
                      main_launch(plan), args);
    }
  });
}

template <class Launcher>
void launch_sums(const BackwardArguments& args, const LaunchPlan& plan, Launcher& launcher) {
  if (plan.blocks == 0) return;
  with_vectors(args.params.dtype, plan, [&](auto vector) {
    using E = decltype(vector);
    if constexpr (E::kWhole) {
      if (plan.columns) return launcher.launch(column_sums<E>, main_launch(plan), args);
    }
    launcher.launch(row_sums<E>, main_launch(plan), args);
  });
}

template <class Launcher>
void run_backward_moments(const bnexport_backward& params, const LaunchPlan& plan, void* workspace, double* row,
                          Launcher& launcher) {
  auto args = arguments_of<BackwardArguments>(params, plan, workspace);
  args.row = row;
  launch_sums(args, plan, launcher);
  launcher.launch(backward_channels, channel_launch(params.C), args);
}

// With fixed statistics dx = scale * dy: the normalising kernel of the forward, and x is not read.
template <class Launcher>
void launch_scaling(const BackwardArguments& from, const LaunchPlan& plan, Launcher& launcher) {
  ForwardArguments args{};
  args.params.x = from.params.dy;
  args.params.y = from.params.dx;
  args.split = from.split;
  args.columns = from.columns;
  args.coefficients = from.scales;
  with_vectors(from.params.dtype, plan, [&](auto vector) {
    using E = decltype(vector);
    if constexpr (E::kWhole) {
      if (plan.columns) return launcher.launch(column_normalise<E>, main_launch(plan), args);
    }
    launcher.launch(row_normalise<E>, main_launch(plan), args);
  });
}

template <class Launcher>
void run_backward(const bnexport_backward& params, const LaunchPlan& plan, void* workspace, Launcher& launcher) {
  auto args = arguments_of<BackwardArguments>(params, plan, workspace);
  args.scales = reinterpret_cast<ForwardCoefficients*>(args.coefficients);
  if (plan.strategy == Strategy::kSplit) {
    if (params.C == 0) return;
    const bool gradients = params.dweight != nullptr || params.dbias != nullptr;
    const bool sums = gradients || (params.training && params.dx != nullptr);
    if (params.group_size == 1 && sums) {
      launch_sums(args, plan, launcher);
    } else {
      args.parts.count = 0;
    }
    launcher.launch(backward_channels, channel_launch(params.C), args);
    if (plan.blocks == 0 || params.dx == nullptr) return;
    if (!params.training) {
      launch_scaling(args, plan, launcher);
      return;
    }
    with_vectors(params.dtype, plan, [&](auto vector) {
      using E = decltype(vector);
      if constexpr (E::kWhole) {
        if (plan.columns) return launcher.launch(column_gradient<E>, main_launch(plan), args);
      }
      launcher.launch(row_gradient<E>, main_launch(plan), args);
    });
    return;
  }
  if (plan.strategy == Strategy::kPersistent) launcher.zero(args.arrivals, arrival_bytes(plan));
  with_vectors(params.dtype, plan, [&](auto vector) {
    using E = decltype(vector);
    if constexpr (kHasFused<E>) {
      if constexpr (E::kWhole) {
        if (plan.columns) return launcher.launch(team_backward<E>, main_launch(plan), args);
      }
      launcher.launch(plan.strategy == Strategy::kCluster ? cluster_backward<E> : persistent_backward<E>,
                      main_launch(plan), args);
    }
  });
}

}  // namespace bnexport::cuda
