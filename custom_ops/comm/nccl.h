// Groups over NCCL: an all-gather of doubles between GPUs, on the stream of the computation.
//
// libnccl is opened at run time; the few functions we call have had the same signatures since NCCL 2.14.
// A gather does not wait for the device. A peer that never comes would block the stream for ever, so a
// thread of each communicator watches its collectives: when one has not ended within the timeout after the
// stream came to it, or NCCL reports an error, the thread aborts the communicator. The stream then goes on
// with NaN in place of the rows that did not arrive, and every later call returns the reason. Collectives
// that are captured into a CUDA graph run when the graph is replayed and are not watched.
//
// A process that uses this communicator and another one of NCCL (torch's) on one device must start their
// collectives in the same order on every rank, or let one end before the other starts: two that wait for
// each other's multiprocessors never end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace bnexport::comm {

class NcclError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

constexpr size_t kNcclIdBytes = 128;

// `path` is that of libnccl, or empty for the system's libnccl.so.2. Each function throws NcclError.
void nccl_unique_id(const std::string& path, char id[kNcclIdBytes]);
int nccl_version(const std::string& path);

class NcclCommunicator {
 public:
  // Joins rank `rank` of `size`, on the current device; returns when all ranks have joined.
  NcclCommunicator(const std::string& library, int64_t size, int64_t rank, const char id[kNcclIdBytes],
                   double timeout_seconds);
  // Lets what is under way end, for five seconds at most; aborts it where a peer does not.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Enqueues: receive[r * count .. (r + 1) * count) = rank r's send. Device pointers.
  void all_gather(const double* send, double* receive, int64_t count, void* stream);
  // Throws the reason if a gather failed so far. After the stream has ended it covers every gather on it.
  void require_healthy() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace bnexport::comm
