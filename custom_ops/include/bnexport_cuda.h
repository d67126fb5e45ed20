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
 * and the same for the backward. Each function returns 0, or a non-zero code with a message in `error`.
 */
#ifndef BNEXPORT_CUDA_H
#define BNEXPORT_CUDA_H

#include "bnexport.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BNEXPORT_CUDA_ABI_VERSION 1

BNEXPORT_API uint32_t bnexport_cuda_abi_version(void);

/* The size serves both the moments and the call that follows. */
BNEXPORT_API int bnexport_cuda_forward_workspace(const bnexport_forward* params, size_t* bytes, char* error, size_t capacity);
BNEXPORT_API int bnexport_cuda_backward_workspace(const bnexport_backward* params, size_t* bytes, char* error, size_t capacity);

BNEXPORT_API int bnexport_cuda_moments(const bnexport_forward* params, double* row, void* workspace, size_t bytes,
                                       void* stream, char* error, size_t capacity);
BNEXPORT_API int bnexport_cuda_forward(const bnexport_forward* params, void* workspace, size_t bytes, void* stream,
                                       char* error, size_t capacity);
BNEXPORT_API int bnexport_cuda_backward_moments(const bnexport_backward* params, double* row, void* workspace,
                                                size_t bytes, void* stream, char* error, size_t capacity);
BNEXPORT_API int bnexport_cuda_backward(const bnexport_backward* params, void* workspace, size_t bytes, void* stream,
                                        char* error, size_t capacity);

/* `count` numbers between float32 and float64 (bnexport_dtype); saved statistics leave ONNX nodes in the
 * statistics' type. */
BNEXPORT_API int bnexport_cuda_convert(const void* from, int32_t from_dtype, void* to, int32_t to_dtype, int64_t count,
                                       void* stream, char* error, size_t capacity);
/* `to_host` 1: from the device to the host, and waits for the stream; 0: from the host to the device, and
 * returns when `from` may be changed. */
BNEXPORT_API int bnexport_cuda_copy(void* to, const void* from, size_t bytes, int32_t to_host, void* stream, char* error,
                                    size_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* BNEXPORT_CUDA_H */
