#include "nccl.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace bnexport::comm {

namespace {

using Clock = std::chrono::steady_clock;

// NCCL's C ABI, as far as it is used here.
using Communicator = void*;
using Result = int;
constexpr Result kSuccess = 0, kInProgress = 7;
constexpr int kFloat64 = 8;
struct UniqueId {
  char bytes[kNcclIdBytes];
};
// The fields of NCCL 2.14; later versions fill in what follows from their defaults.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

struct Library {
  Result (*get_version)(int*);
  Result (*get_unique_id)(UniqueId*);
  Result (*init)(Communicator*, int, UniqueId, int, Config*);
  Result (*all_gather)(const void*, void*, size_t, int, Communicator, cudaStream_t);
  Result (*async_error)(Communicator, Result*);
  Result (*abort)(Communicator);
  const char* (*error_string)(Result);
};

template <class Function>
void resolve(void* handle, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) {
    throw NcclError(path + ": has no " + name + ", expected NCCL 2.14 or newer; install a newer nvidia-nccl");
  }
}

// Opened once a path, and never closed: NCCL has threads of its own.
const Library& library(const std::string& given) {
  static std::mutex mutex;
  static auto* const opened = new std::map<std::string, std::unique_ptr<Library>>();
  const std::string path = given.empty() ? "libnccl.so.2" : given;
  const std::scoped_lock lock(mutex);
  std::unique_ptr<Library>& known = (*opened)[path];
  if (known == nullptr) {
    void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* const reason = dlerror();
      throw NcclError(path + ": cannot be opened: " + (reason != nullptr ? reason : "no reason given") +
                      "; expected NCCL; install nvidia-nccl-cu13 (PyTorch for CUDA brings it along)");
    }
    auto loaded = std::make_unique<Library>();
    resolve(handle, path, "ncclGetVersion", loaded->get_version);
    resolve(handle, path, "ncclGetUniqueId", loaded->get_unique_id);
    resolve(handle, path, "ncclCommInitRankConfig", loaded->init);
    resolve(handle, path, "ncclAllGather", loaded->all_gather);
    resolve(handle, path, "ncclCommGetAsyncError", loaded->async_error);
    resolve(handle, path, "ncclCommAbort", loaded->abort);
    resolve(handle, path, "ncclGetErrorString", loaded->error_string);
    known = std::move(loaded);
  }
  return *known;
}

void check(const Library& nccl, Result result, const char* what) {
  if (result == kSuccess || result == kInProgress) return;
  throw NcclError(std::string("NCCL: ") + what + ": " + nccl.error_string(result));
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw NcclError(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error));
}

}  // namespace

void nccl_unique_id(const std::string& path, char id[kNcclIdBytes]) {
  const Library& nccl = library(path);
  UniqueId made{};
  check(nccl, nccl.get_unique_id(&made), "ncclGetUniqueId");
  std::memcpy(id, made.bytes, kNcclIdBytes);
}

int nccl_version(const std::string& path) {
  const Library& nccl = library(path);
  int version = 0;
  check(nccl, nccl.get_version(&version), "ncclGetVersion");
  return version;
}

class NcclCommunicator::State {
 public:
  State(const std::string& path, int64_t size, int64_t rank, const char id[kNcclIdBytes], double timeout)
      : nccl_(library(path)),
        where_("rank " + std::to_string(rank) + " of " + std::to_string(size)),
        timeout_(timeout) {
    check(cudaGetDevice(&device_), "cudaGetDevice");
    UniqueId unique;
    std::memcpy(unique.bytes, id, kNcclIdBytes);
    Config config;
    check(nccl_, nccl_.init(&communicator_, static_cast<int>(size), unique, static_cast<int>(rank), &config),
          "ncclCommInitRankConfig");
    try {
      settle("joining the group");
    } catch (...) {
      nccl_.abort(communicator_);
      throw;
    }
    watchdog_ = std::thread([this] { watch(); });
  }

  ~State() {
    {
      const std::scoped_lock lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    watchdog_.join();
    if (failure_.empty()) nccl_.abort(communicator_);
    for (const Pending& pending : pending_) cudaEventDestroy(pending.event);
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
  }

  void all_gather(const double* send, double* receive, int64_t count, cudaStream_t stream) {
    const std::scoped_lock lock(mutex_);
    if (!failure_.empty()) throw NcclError(failure_);
    try {
      enqueue(send, receive, count, stream);
    } catch (const NcclError& error) {
      fail(error.what());
      throw;
    }
  }

 private:
  struct Pending {
    cudaEvent_t event;
    Clock::time_point deadline;
  };

  void enqueue(const double* send, double* receive, int64_t count, cudaStream_t stream) {
    check(nccl_, nccl_.all_gather(send, receive, static_cast<size_t>(count), kFloat64, communicator_, stream),
          "ncclAllGather");
    settle("ncclAllGather");
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    if (capture != cudaStreamCaptureStatusNone) return;
    Pending pending{take_event(), deadline()};
    if (const cudaError_t error = cudaEventRecord(pending.event, stream); error != cudaSuccess) {
      free_.push_back(pending.event);
      check(error, "cudaEventRecord");
    }
    pending_.push_back(pending);
    wake_.notify_all();
  }

  Clock::time_point deadline() const {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_));
  }

  std::string too_late(const char* what) const {
    return std::string("NCCL: ") + what + " did not end within " + std::to_string(timeout_) + " s on " + where_ +
           "; check that every process of the group is alive and runs the same nodes";
  }

  // Non-blocking communicators answer "in progress" while they set up connections.
  void settle(const char* what) const {
    const Clock::time_point end = deadline();
    for (auto pause = std::chrono::microseconds(10);; pause = std::min(2 * pause, std::chrono::microseconds(5000))) {
      Result state = kSuccess;
      check(nccl_, nccl_.async_error(communicator_, &state), "ncclCommGetAsyncError");
      check(nccl_, state, what);
      if (state == kSuccess) return;
      if (Clock::now() >= end) throw NcclError(too_late(what));
      std::this_thread::sleep_for(pause);
    }
  }

  cudaEvent_t take_event() {
    cudaEvent_t event = nullptr;
    if (free_.empty()) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    } else {
      event = free_.back();
      free_.pop_back();
    }
    return event;
  }

  void watch() {
    cudaSetDevice(device_);
    // A capture elsewhere in the process forbids queries to threads in the default mode, and would fail.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
      wake_.wait_for(lock, std::chrono::milliseconds(100));
      if (!failure_.empty()) continue;
      Result state = kSuccess;
      if (nccl_.async_error(communicator_, &state) != kSuccess || (state != kSuccess && state != kInProgress)) {
        fail(std::string("NCCL: a collective failed on ") + where_ + ": " + nccl_.error_string(state));
        continue;
      }
      cudaError_t query = cudaSuccess;
      while (!pending_.empty() && (query = cudaEventQuery(pending_.front().event)) == cudaSuccess) {
        free_.push_back(pending_.front().event);
        pending_.pop_front();
      }
      if (query != cudaSuccess && query != cudaErrorNotReady) {
        fail(std::string("CUDA: ") + cudaGetErrorString(query) + " (seen while an all-gather was under way on " +
             where_ + ")");
      } else if (!pending_.empty() && Clock::now() >= pending_.front().deadline) {
        fail(too_late("an all-gather"));
      }
    }
  }

  // With the mutex held.
  void fail(const std::string& reason) {
    failure_ = reason;
    nccl_.abort(communicator_);
  }

  const Library& nccl_;
  std::string where_;
  double timeout_;
  int device_ = 0;
  Communicator communicator_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::string failure_;
  std::deque<Pending> pending_;
  std::vector<cudaEvent_t> free_;
  std::thread watchdog_;
};

NcclCommunicator::NcclCommunicator(const std::string& library, int64_t size, int64_t rank, const char id[kNcclIdBytes],
                                   double timeout_seconds)
    : state_(std::make_unique<State>(library, size, rank, id, timeout_seconds)) {}

NcclCommunicator::~NcclCommunicator() = default;

void NcclCommunicator::all_gather(const double* send, double* receive, int64_t count, void* stream) {
  state_->all_gather(send, receive, count, static_cast<cudaStream_t>(stream));
}

}  // namespace bnexport::comm
