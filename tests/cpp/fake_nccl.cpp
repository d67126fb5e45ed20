// A libnccl whose ranks are threads of one process. An all-gather ends on every rank's stream when the
// last rank has come; like NCCL's, it never blocks the caller.
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "fake_cuda/cuda_runtime_api.h"

namespace {

struct UniqueId {
  char bytes[128];
};
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};
struct Call {
  const void* send;
  void* receive;
  size_t count;
  FakeStream* stream;
};
struct World {
  std::vector<std::vector<Call>> calls;  // by rank
  int joined = 0;
};
struct Rank {
  World* world;
  int rank, size;
  bool aborted = false;
};

std::mutex mutex;
std::map<std::string, World> worlds;
int next_id = 0, aborts = 0, broken = 0;

void run_complete(World& world) {
  for (;;) {
    for (const auto& calls : world.calls) {
      if (calls.empty()) return;
    }
    for (auto& to : world.calls) {
      for (size_t r = 0; r < world.calls.size(); ++r) {
        const Call& from = world.calls[r].front();
        std::memcpy(static_cast<double*>(to.front().receive) + r * from.count, from.send, from.count * sizeof(double));
      }
    }
    for (auto& calls : world.calls) {
      ++calls.front().stream->done;
      calls.erase(calls.begin());
    }
  }
}

}  // namespace

extern "C" {
int ncclGetVersion(int* version) {
  *version = 22703;
  return 0;
}
int ncclGetUniqueId(UniqueId* id) {
  const std::scoped_lock lock(mutex);
  std::memset(id, 0, sizeof(*id));
  std::string name = "group " + std::to_string(next_id++);
  std::memcpy(id->bytes, name.data(), name.size());
  return 0;
}
int ncclCommInitRankConfig(Rank** communicator, int size, UniqueId id, int rank, Config* config) {
  const std::scoped_lock lock(mutex);
  if (config->magic != 0xcafebeef || config->blocking != 0 || config->version < 21400) return 4;
  World& world = worlds[id.bytes];
  world.calls.resize(static_cast<size_t>(size));
  ++world.joined;
  *communicator = new Rank{&world, rank, size};
  return 7;
}
int ncclAllGather(const void* send, void* receive, size_t count, int type, Rank* self, FakeStream* stream) {
  const std::scoped_lock lock(mutex);
  if (type != 8) return 4;
  stream = fake_stream(stream);
  ++stream->enqueued;
  self->world->calls[static_cast<size_t>(self->rank)].push_back({send, receive, count, stream});
  run_complete(*self->world);
  return 0;
}
int ncclCommGetAsyncError(Rank* self, int* state) {
  const std::scoped_lock lock(mutex);
  *state = self->world->joined < self->size ? 7 : broken;
  return 0;
}
int ncclCommAbort(Rank* self) {
  const std::scoped_lock lock(mutex);
  ++aborts;
  for (const Call& call : self->world->calls[static_cast<size_t>(self->rank)]) ++call.stream->done;
  self->world->calls[static_cast<size_t>(self->rank)].clear();
  delete self;
  return 0;
}
const char* ncclGetErrorString(int result) { return result == 6 ? "remote process exited" : "invalid argument"; }

// For the test.
int fake_nccl_aborts() {
  const std::scoped_lock lock(mutex);
  return aborts;
}
void fake_nccl_break(int result) {
  const std::scoped_lock lock(mutex);
  broken = result;
}
}
