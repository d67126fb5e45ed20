/* bnexport: groups over NCCL, in the CUDA library.
 *
 * One process makes an id, all processes join with it, each on its current device, and then register
 * bnexport_nccl_all_gather as the group's device all-gather:
 *
 *   bnexport_nccl_unique_id(NULL, id, ...);                       one rank; the others receive the 128 bytes
 *   bnexport_nccl_join(NULL, size, rank, id, seconds, &communicator, ...);
 *   bnexport_register_device_group(name, size, rank, bnexport_nccl_all_gather, communicator, ...);
 */
#ifndef BNEXPORT_NCCL_H
#define BNEXPORT_NCCL_H

#include "bnexport.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BNEXPORT_NCCL_ID_BYTES 128

/* `library` is the path of libnccl; NULL means the system's libnccl.so.2. Each function returns 0, or a
 * non-zero code with a message in `error`. */
BNEXPORT_API int bnexport_nccl_version(const char* library, int* version, char* error, size_t capacity);
BNEXPORT_API int bnexport_nccl_unique_id(const char* library, char* id, char* error, size_t capacity);
/* Returns when all ranks have joined, or an error after `timeout_seconds`, which then also bounds every
 * all-gather: one that has not ended by then, counted from when the stream came to it, is aborted. What it
 * would have received is NaN, the stream goes on, and later calls return the reason. */
BNEXPORT_API int bnexport_nccl_join(const char* library, int64_t size, int64_t rank, const char* id,
                                    double timeout_seconds, void** communicator, char* error, size_t capacity);
BNEXPORT_API void bnexport_nccl_leave(void* communicator);
/* 0, or the reason why a gather failed so far. Asked after the stream has ended, it covers every gather on it. */
BNEXPORT_API int bnexport_nccl_status(void* communicator, char* error, size_t capacity);
/* A bnexport_device_all_gather; its context is the communicator. */
BNEXPORT_API int bnexport_nccl_all_gather(void* communicator, const double* send, double* receive, int64_t count,
                                          void* stream, char* error, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* BNEXPORT_NCCL_H */
