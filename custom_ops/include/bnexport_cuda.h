/* bnexport: the sync batch norm kernels for NVIDIA GPUs, in a library of their own.
 *
 * The parameters are those of bnexport.h with device pointers: data, vectors, saved statistics, gathered
 * rows and local moments all lie in device memory; `threads` is ignored. Work is enqueued on `stream`, a
 * cudaStream_t of the current device; nothing is allocated, nothing waits for the device, and every call
 * but bnexport_cuda_copy and bnexport_cuda_wait can be captured into a CUDA graph. Results have the same bits on
 * every run.
 *
 * A workspace of the size that the query returns, or a larger one, belongs to a call until its work is done. It must
 * be aligned to 256 bytes; what it holds does not matter. Later calls on the same stream may use it again.
 *
 *   one process     forward with group_size 1: statistics and output, in one call
 *   a group         moments -> all-gather of the rows -> forward with `gathered`
 *
 * and the same for the backward. Each function returns 0, or a non-zero code with a message in `error`:
 * 1 for a wrong argument, 4 for an error of the CUDA runtime, 5 for a device without code in the library. S is at most
 * 2^30 and C below 2^31; N * C * S may exceed 2^32.
 */
#ifndef BNEXPORT_CUDA_H
#define BNEXPORT_CUDA_H

#include "bnexport.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BNEXPORT_CUDA_ABI_VERSION 4

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

/* On the current device; the size serves both the moments and the call that follows, in both directions. */
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

#ifdef __cplusplus
}
#endif

#endif /* BNEXPORT_CUDA_H */
