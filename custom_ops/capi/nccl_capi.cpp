// The C API of bnexport_nccl.h.
#include "bnexport_nccl.h"

#include <cstdio>
#include <exception>
#include <string>

#include "../comm/nccl.h"

namespace {

static_assert(BNEXPORT_NCCL_ID_BYTES == bnexport::comm::kNcclIdBytes, "the size of NCCL's unique id");

template <class Body>
int guarded(char* error, size_t capacity, const Body& body) noexcept {
  try {
    body();
    return 0;
  } catch (const std::exception& exception) {
    if (error != nullptr && capacity > 0) std::snprintf(error, capacity, "%s", exception.what());
    return 1;
  } catch (...) {
    if (error != nullptr && capacity > 0) std::snprintf(error, capacity, "unknown error");
    return 1;
  }
}

std::string path(const char* library) { return library == nullptr ? "" : library; }

void require(bool holds, const char* what) {
  if (!holds) throw bnexport::comm::NcclError(what);
}

}  // namespace

extern "C" {

int bnexport_nccl_version(const char* library, int* version, char* error, size_t capacity) {
  return guarded(error, capacity, [&] {
    require(version != nullptr, "version: got NULL, expected a pointer");
    *version = bnexport::comm::nccl_version(path(library));
  });
}

int bnexport_nccl_unique_id(const char* library, char* id, char* error, size_t capacity) {
  return guarded(error, capacity, [&] {
    require(id != nullptr, "id: got NULL, expected 128 bytes");
    bnexport::comm::nccl_unique_id(path(library), id);
  });
}

int bnexport_nccl_join(const char* library, int64_t size, int64_t rank, const char* id, double timeout_seconds,
                       void** communicator, char* error, size_t capacity) {
  return guarded(error, capacity, [&] {
    require(id != nullptr && communicator != nullptr, "id, communicator: got NULL, expected pointers");
    require(size >= 1 && size <= 1000000 && rank >= 0 && rank < size,
            "size, rank: expected 0 <= rank < size <= 1000000");
    require(timeout_seconds > 0, "timeout_seconds: expected a number above 0");
    *communicator = new bnexport::comm::NcclCommunicator(path(library), size, rank, id, timeout_seconds);
  });
}

void bnexport_nccl_leave(void* communicator) { delete static_cast<bnexport::comm::NcclCommunicator*>(communicator); }

int bnexport_nccl_status(void* communicator, char* error, size_t capacity) {
  return guarded(error, capacity, [&] {
    require(communicator != nullptr, "communicator: got NULL, expected one from bnexport_nccl_join");
    static_cast<bnexport::comm::NcclCommunicator*>(communicator)->require_healthy();
  });
}

int bnexport_nccl_all_gather(void* communicator, const double* send, double* receive, int64_t count, void* stream,
                             char* error, size_t capacity) {
  return guarded(error, capacity, [&] {
    require(communicator != nullptr, "communicator: got NULL, expected one from bnexport_nccl_join");
    static_cast<bnexport::comm::NcclCommunicator*>(communicator)->all_gather(send, receive, count, stream);
  });
}

}  // extern "C"
