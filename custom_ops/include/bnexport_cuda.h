/* bnexport: the sync batch norm kernels for NVIDIA GPUs, in a library of their own.
 *
 * The parameters are those of bnexport.h with device pointers: data, vectors, saved statistics, gathered
 * rows and local moments all lie in device memory; `threads` is ignored. Work is enqueued on `stream`, a
 * cudaStream_t of the current device; nothing is allocated, nothing waits for the device, and every call
 * but bnexport_cuda_copy to the host can be captured into a CUDA graph. Results have the same bits on
 * every run.
 *
 * A workspace of the size that the query returns (it may be 0) belongs to a call until its work is done.
 * It need not be initialised, must be aligned to 256 bytes, and may be used again by later calls on the
 * same stream.
 *
 *   one process     forward with group_size 1: statistics and output, in one call
 *   a group         moments -> all-gather of the rows -> forward with `gathered`
 *
 * and the same for the backward. Each function returns 0, or a non-zero code with a message in `error`:
 * 1 for a wrong argument, 4 for an error of the CUDA runtime. S is at most 2^30 and C below 2^31; N * C * S
 * may exceed 2^32.
 */
#ifndef BNEXPORT_CUDA_H
#define BNEXPORT_CUDA_H

#include "bnexport.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BNEXPORT_CUDA_ABI_VERSION 2

BNEXPORT_API uint32_t bnexport_cuda_abi_version(void);
BNEXPORT_API const char* bnexport_cuda_version(void);
/* The CUDA version that the library was built with, as 1000 * major + 10 * minor; a driver must not be older than its
 * major version. */
BNEXPORT_API int bnexport_cuda_runtime_version(void);
/* How many devices there are; 0 without a driver. */
BNEXPORT_API int bnexport_cuda_device_count(void);

/* 0 when the kernels can run on a device; else an error with the reason: no such device, or no code for it in
 * this library. */
BNEXPORT_API int bnexport_cuda_check_device(int32_t device, char* error, size_t capacity);
/* Makes `device` this thread's current one; `previous` receives the one before, or -1 where nobody uses that one: to
 * make it current again would take some 500 MB of its memory. */
BNEXPORT_API int bnexport_cuda_set_device(int32_t device, int32_t* previous, char* error, size_t capacity);

/* Returns when the stream has done what is on it. */
BNEXPORT_API int bnexport_cuda_wait(void* stream, char* error, size_t capacity);

/* The size serves both the moments and the call that follows. */
BNEXPORT_API int bnexport_cuda_forward_workspace(const bnexport_forward* params, size_t* bytes, char* error,
                                                 size_t capacity);
BNEXPORT_API int bnexport_cuda_backward_workspace(const bnexport_backward* params, size_t* bytes, char* error,
                                                  size_t capacity);

BNEXPORT_API int bnexport_cuda_moments(const bnexport_forward* params, double* row, void* workspace, size_t bytes,
                                       void* stream, char* error, size_t capacity);
BNEXPORT_API int bnexport_cuda_forward(const bnexport_forward* params, void* workspace, size_t bytes, void* stream,
                                       char* error, size_t capacity);
BNEXPORT_API int bnexport_cuda_backward_moments(const bnexport_backward* params, double* row, void* workspace,
                                                size_t bytes, void* stream, char* error, size_t capacity);
BNEXPORT_API int bnexport_cuda_backward(const bnexport_backward* params, void* workspace, size_t bytes, void* stream,
                                        char* error, size_t capacity);

/* `to_host` 1: from the device to the host, and waits for the stream; 0: from the host to the device, and
 * returns when `from` may be changed. */
BNEXPORT_API int bnexport_cuda_copy(void* to, const void* from, size_t bytes, int32_t to_host, void* stream,
                                    char* error, size_t capacity);

/* For measurements and tests.
 *
 * How a tensor is read:
 *   cluster     a cluster of thread blocks keeps a channel in shared memory: one read, one launch
 *   persistent  as many channels at a time as L2 holds: one read from memory, one launch
 *   split       statistics, then output: two reads, three launches; the way around a collective
 *
 * Calls choose by themselves unless this thread asked for something else; what the tensor or the device
 * does not allow is then an error. `cluster`: blocks of a cluster, a power of two up to 16. 0: automatic.
 * refused: automatic, as on a device that refuses every launch of blocks that wait for each other. */
enum bnexport_cuda_strategy {
  BNEXPORT_CUDA_AUTOMATIC = 0,
  BNEXPORT_CUDA_CLUSTER = 1,
  BNEXPORT_CUDA_PERSISTENT = 2,
  BNEXPORT_CUDA_SPLIT = 3,
  BNEXPORT_CUDA_REFUSED = 4
};
BNEXPORT_API int bnexport_cuda_prefer(int32_t strategy, int32_t cluster, char* error, size_t capacity);

/* What the call with these parameters will do. */
typedef struct bnexport_cuda_plan {
  int32_t strategy;
  int32_t cluster;
  int32_t threads; /* of a block */
  int32_t shared;  /* bytes of a block */
  int64_t blocks;  /* of a pass */
} bnexport_cuda_plan;
BNEXPORT_API int bnexport_cuda_plan_forward(const bnexport_forward* params, bnexport_cuda_plan* plan, char* error,
                                            size_t capacity);
BNEXPORT_API int bnexport_cuda_plan_backward(const bnexport_backward* params, bnexport_cuda_plan* plan, char* error,
                                             size_t capacity);
/* What this thread's last bnexport_cuda_forward or bnexport_cuda_backward did. `refused` 1: the device refused to
 * launch what was planned, and this stood in for it. */
BNEXPORT_API int bnexport_cuda_ran(bnexport_cuda_plan* plan, int32_t* refused, char* error, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* BNEXPORT_CUDA_H */
