#include "nccl.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace bnexport::comm {

namespace {

using Clock = std::chrono::steady_clock;

// NCCL's C ABI, as far as it is used here.
using Communicator = void*;
using Result = int;
constexpr Result kSuccess = 0, kInProgress = 7;
constexpr int kFloat64 = 8;
constexpr double kLongestLeave = 5;  // seconds
struct UniqueId {
  char bytes[kNcclIdBytes];
};
// The fields of NCCL 2.14; later versions fill in what follows from their defaults.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 1;
};

struct Library {
  Result (*get_version)(int*);
  Result (*get_unique_id)(UniqueId*);
  Result (*init)(Communicator*, int, UniqueId, int, Config*);
  Result (*all_gather)(const void*, void*, size_t, int, Communicator, cudaStream_t);
  Result (*async_error)(Communicator, Result*);
  Result (*finalize)(Communicator);
  Result (*destroy)(Communicator);
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
    resolve(handle, path, "ncclCommFinalize", loaded->finalize);
    resolve(handle, path, "ncclCommDestroy", loaded->destroy);
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

// What the thread that joins shares with the one that waits for it.
struct Joining {
  std::mutex mutex;
  std::condition_variable done;
  bool ended = false, abandoned = false;
  Result result = kSuccess;
  Communicator communicator = nullptr;
};

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
        size_(size),
        timeout_(timeout) {
    check(cudaGetDevice(&device_), "cudaGetDevice");
    communicator_ = join(rank, id);
    watchdog_ = std::thread([this] { watch(); });
  }

  ~State() {
    {
      const std::scoped_lock lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    watchdog_.join();
    if (failure_.empty()) leave();
    for (const Pending& pending : pending_) {
      cudaEventDestroy(pending.start);
      cudaEventDestroy(pending.end);
    }
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
  }

  void all_gather(const double* send, double* receive, int64_t count, cudaStream_t stream) {
    const std::scoped_lock turn(turn_);
    {
      const std::scoped_lock lock(mutex_);
      if (!failure_.empty()) throw NcclError(failure_);
    }
    try {
      enqueue(send, receive, count, stream);
    } catch (const NcclError& error) {
      const std::scoped_lock lock(mutex_);
      if (failure_.empty()) fail(error.what());
      throw NcclError(failure_);
    }
  }

  void require_healthy() {
    const std::scoped_lock lock(mutex_);
    if (!failure_.empty()) throw NcclError(failure_);
  }

 private:
  // A gather between two events. Its time starts when the stream has come to it: what was enqueued before
  // may take as long as it likes.
  struct Pending {
    cudaEvent_t start, end;
    bool started = false;
    Clock::time_point deadline;
  };

  // A blocking communicator costs no polling at each gather, but joining blocks for as long as a peer does
  // not come. So a thread of its own joins, and is left behind at the deadline: should the peer come after
  // all, it aborts what it got.
  Communicator join(int64_t rank, const char id[kNcclIdBytes]) {
    auto joining = std::make_shared<Joining>();
    UniqueId unique;
    std::memcpy(unique.bytes, id, kNcclIdBytes);
    std::thread([joining, unique, rank, &nccl = nccl_, size = size_, device = device_] {
      cudaSetDevice(device);
      Config config;
      Communicator made = nullptr;
      Result result = nccl.init(&made, static_cast<int>(size), unique, static_cast<int>(rank), &config);
      while (result == kInProgress && nccl.async_error(made, &result) == kSuccess && result == kInProgress) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      const std::scoped_lock lock(joining->mutex);
      if (joining->abandoned && result == kSuccess) nccl.abort(made);
      joining->result = result;
      joining->communicator = made;
      joining->ended = true;
      joining->done.notify_all();
    }).detach();
    std::unique_lock<std::mutex> lock(joining->mutex);
    if (!joining->done.wait_until(lock, deadline(), [&] { return joining->ended; })) {
      joining->abandoned = true;
      throw NcclError(too_late("joining the group"));
    }
    check(nccl_, joining->result, "joining the group");
    return joining->communicator;
  }

  // Ends what is under way and frees the communicator; a peer that is gone must not keep this process, so a
  // thread does it that is left behind at the deadline.
  void leave() noexcept try {
    auto leaving = std::make_shared<Joining>();
    std::thread([leaving, &nccl = nccl_, communicator = communicator_, device = device_] {
      cudaSetDevice(device);
      const Result result = nccl.finalize(communicator);
      const std::scoped_lock lock(leaving->mutex);
      if (!leaving->abandoned && result == kSuccess) {
        nccl.destroy(communicator);
        leaving->communicator = communicator;
      }
      leaving->ended = true;
      leaving->done.notify_all();
    }).detach();
    std::unique_lock<std::mutex> lock(leaving->mutex);
    leaving->done.wait_until(lock, std::min(deadline(), after(kLongestLeave)), [&] { return leaving->ended; });
    leaving->abandoned = true;
    if (leaving->communicator == nullptr) nccl_.abort(communicator_);
  } catch (const std::exception&) {  // no memory, or no thread to wait with
    nccl_.abort(communicator_);
  }

  void enqueue(const double* send, double* receive, int64_t count, cudaStream_t stream) {
    // Should the gather be aborted, what was not received is NaN.
    check(cudaMemsetAsync(receive, 0xff, static_cast<size_t>(size_ * count) * sizeof(double), stream),
          "cudaMemsetAsync");
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    const bool watched = capture == cudaStreamCaptureStatusNone;
    // Back to the others should the gather fail.
    const auto give_back = [this](cudaEvent_t event) {
      const std::scoped_lock lock(events_);
      free_.push_back(event);
    };
    using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, decltype(give_back)>;
    Event start(watched ? record(stream) : nullptr, give_back);
    {
      const std::scoped_lock lock(mutex_);
      if (!failure_.empty()) throw NcclError(failure_);
      call_deadline_ = deadline();
      calling_ = true;
    }
    const Result result = nccl_.all_gather(send, receive, static_cast<size_t>(count), kFloat64, communicator_, stream);
    const std::scoped_lock lock(mutex_);
    calling_ = false;
    if (!failure_.empty()) throw NcclError(failure_);
    check(nccl_, result, "ncclAllGather");
    if (!watched) return;
    cudaEvent_t end = record(stream);
    pending_.push_back({start.release(), end, false, {}});
  }

  static Clock::time_point after(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }
  Clock::time_point deadline() const { return after(timeout_); }

  std::string too_late(const char* what) const {
    return std::string("NCCL: ") + what + " did not end within " + std::to_string(timeout_) + " s on " + where_ +
           "; check that every process of the group is alive and runs the same nodes";
  }

  // An event behind what is on the stream.
  cudaEvent_t record(cudaStream_t stream) {
    const std::scoped_lock lock(events_);
    cudaEvent_t event = nullptr;
    if (free_.empty()) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    } else {
      event = free_.back();
      free_.pop_back();
    }
    if (const cudaError_t error = cudaEventRecord(event, stream); error != cudaSuccess) {
      free_.push_back(event);
      check(error, "cudaEventRecord");
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
      if (failure_.empty()) look();
    }
  }

  // With the mutex held. A communicator is not aborted under a thread that is inside of NCCL, unless that
  // thread is what hangs.
  void look() {
    if (calling_) {
      if (Clock::now() >= call_deadline_) fail(too_late("enqueuing an all-gather"));
      return;
    }
    Result state = kSuccess;
    if (nccl_.async_error(communicator_, &state) != kSuccess || (state != kSuccess && state != kInProgress)) {
      return fail(std::string("NCCL: a collective failed on ") + where_ + ": " + nccl_.error_string(state));
    }
    cudaError_t query = cudaSuccess;
    while (!pending_.empty() && (query = cudaEventQuery(pending_.front().end)) == cudaSuccess) {
      const std::scoped_lock lock(events_);
      free_.push_back(pending_.front().start);
      free_.push_back(pending_.front().end);
      pending_.pop_front();
    }
    if (query == cudaErrorNotReady) {
      Pending& first = pending_.front();
      if (!first.started) {
        query = cudaEventQuery(first.start);
        first.started = query == cudaSuccess;
        if (first.started) first.deadline = deadline();
      } else if (Clock::now() >= first.deadline) {
        return fail(too_late("an all-gather"));
      }
    }
    if (query != cudaSuccess && query != cudaErrorNotReady) {
      fail(std::string("CUDA: ") + cudaGetErrorString(query) + " (seen while an all-gather was under way on " + where_ +
           ")");
    }
  }

  // With the mutex held.
  void fail(const std::string& reason) {
    failure_ = reason;
    nccl_.abort(communicator_);
  }

  const Library& nccl_;
  std::string where_;
  int64_t size_;
  double timeout_;
  int device_ = 0;
  Communicator communicator_ = nullptr;
  std::mutex turn_;    // one gather at a time
  std::mutex mutex_;   // everything below
  std::mutex events_;  // free_
  std::condition_variable wake_;
  bool stop_ = false, calling_ = false;
  Clock::time_point call_deadline_;
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

void NcclCommunicator::require_healthy() const { state_->require_healthy(); }

}  // namespace bnexport::comm
