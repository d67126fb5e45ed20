/* bnexport: the small C API of the sync batch norm kernels.
 *
 * Pointers, sizes and a thread count in, a status out; no ONNX Runtime and no PyTorch types. The
 * ONNX Runtime operators and PyTorch's reach the same kernels through it.
 *
 * A tensor is seen as (N, C, S): N the batch, C the channels, S the product of the spatial sizes.
 * Statistics of a group of processes are merged from rows of 2 C + 1 doubles, one row a process in
 * rank order, that the caller exchanges (one all-gather):
 *
 *   forward   [weight, mean_0 .. mean_C-1, spread_0 .. spread_C-1]
 *   backward  [weight, sum dy .. (C), sum dy * x_hat .. (C)]
 *
 *   stats_mode   weight of a process     spread
 *   exact        N * S (its count)       M2 = sum (x - mean)^2
 *   default      1, or 0 when empty      M2 / (N * S)
 *   N            N                       M2 / (N * S)
 */
#ifndef BNEXPORT_H
#define BNEXPORT_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define BNEXPORT_API __declspec(dllexport)
#else
#define BNEXPORT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define BNEXPORT_ABI_VERSION 1

enum bnexport_dtype { BNEXPORT_FLOAT32 = 0, BNEXPORT_FLOAT16 = 1, BNEXPORT_BFLOAT16 = 2, BNEXPORT_FLOAT64 = 3 };
enum bnexport_layout { BNEXPORT_NCS = 0, BNEXPORT_NSC = 1 };
enum bnexport_stats_mode { BNEXPORT_STATS_EXACT = 0, BNEXPORT_STATS_DEFAULT = 1, BNEXPORT_STATS_N = 2 };
enum bnexport_grad_reduction { BNEXPORT_GRAD_LOCAL = 0, BNEXPORT_GRAD_MEAN = 1, BNEXPORT_GRAD_SUM = 2 };

/* Forward. NULL pointers mean "absent" unless said otherwise. */
typedef struct bnexport_forward {
  uint32_t struct_size; /* sizeof(bnexport_forward); later versions append fields */
  int32_t dtype;        /* of x and y: bnexport_dtype */
  int32_t stats_dtype;  /* of weight, bias and running statistics: FLOAT32 or FLOAT64 */
  int32_t layout;       /* bnexport_layout, the same for x and y */
  int64_t N, C, S;
  const void* x; /* N * C * S elements */
  void* y;       /* N * C * S elements; may not overlap x partly; y == x is allowed */
  const void* weight;
  const void* bias;
  const void* running_mean; /* required when training is 0 */
  const void* running_var;
  void* running_mean_out; /* may equal running_mean */
  void* running_var_out;
  double* saved_mean;   /* C doubles */
  double* saved_invstd; /* C doubles */
  double momentum;
  double eps;
  int32_t training;
  int32_t stats_mode;
  int64_t group_size;     /* 1: gathered is ignored */
  const double* gathered; /* group_size rows of 2 C + 1 doubles, in rank order */
  int32_t threads;        /* >= 1 */
  /* 0, or on CUDA devices 1: saved_mean and saved_invstd point to C values of stats_dtype. */
  int32_t saved_as_statistics;
} bnexport_forward;

/* Backward. dx, dweight, dbias may be NULL where they are not needed. */
typedef struct bnexport_backward {
  uint32_t struct_size;
  int32_t dtype;
  int32_t stats_dtype; /* of weight, dweight, dbias */
  int32_t layout;      /* of dy, x and dx */
  int64_t N, C, S;
  const void* dy;
  const void* x;
  void* dx; /* dx == dy is allowed */
  const void* weight;
  const double* saved_mean;
  const double* saved_invstd;
  void* dweight;
  void* dbias;
  int32_t training; /* 0: fixed statistics, dx = weight * invstd * dy */
  int32_t stats_mode;
  int32_t grad_reduction;
  int64_t group_size;
  const double* gathered;      /* group_size rows of 2 C + 1 doubles, in rank order */
  const double* local_moments; /* this process's own row, required when group_size > 1 */
  int32_t threads;
  int32_t saved_as_statistics; /* as above */
} bnexport_backward;

BNEXPORT_API uint32_t bnexport_abi_version(void);
BNEXPORT_API const char* bnexport_version(void);

/* Lends the program's OpenMP runtime to this API: the address of its GOMP_parallel (-fopenmp). Without one, or with
 * NULL, and in a forked child, calls run in the caller's thread alone. ONNX Runtime's path never uses it. */
BNEXPORT_API void bnexport_lend_openmp(void* gomp_parallel);

/* Each returns 0, or a non-zero code with a message of at most `capacity` bytes in `error`. */
BNEXPORT_API int bnexport_cpu_moments(const bnexport_forward* params, double* row, char* error, size_t capacity);
BNEXPORT_API int bnexport_cpu_forward(const bnexport_forward* params, char* error, size_t capacity);
BNEXPORT_API int bnexport_cpu_backward_moments(const bnexport_backward* params, double* row, char* error,
                                               size_t capacity);
BNEXPORT_API int bnexport_cpu_backward(const bnexport_backward* params, char* error, size_t capacity);

/* Groups of processes, for the ONNX Runtime operators.
 *
 * An all_gather sends `count` doubles and receives `size * count`, in rank order. It returns 0, or
 * another value and a message in `error`; it must return within the group's timeout and must not
 * throw. It is called from the thread that runs the session, the same number of times on every rank. */
typedef int (*bnexport_all_gather)(void* context, const double* send, double* receive, int64_t count, char* error,
                                   size_t capacity);

/* Registers `name`, replacing what was registered under it. 1 <= size, 0 <= rank < size. */
BNEXPORT_API int bnexport_register_group(const char* name, int64_t size, int64_t rank, bnexport_all_gather all_gather,
                                         void* context, char* error, size_t capacity);
/* Forgets the group. A run in progress keeps using it; do not free `context` before it has ended. */
BNEXPORT_API int bnexport_unregister_group(const char* name, char* error, size_t capacity);

/* The operators of this library as JSON: names, domains, types, inputs, outputs, attributes. */
BNEXPORT_API const char* bnexport_describe(void);
/* The instruction set that the kernels use: "baseline", "avx2" or "avx512". */
BNEXPORT_API const char* bnexport_instruction_set(void);

#ifdef __cplusplus
}
#endif

#endif /* BNEXPORT_H */
