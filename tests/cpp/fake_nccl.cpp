// A libnccl whose ranks are threads of one process. Joining blocks until the last rank has come, as with a
// blocking communicator. An all-gather ends on every rank's stream when the last rank has come, and blocks no
// caller unless the test asks for it.
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
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
// Never destroyed: a thread that joins in vain still waits when the process ends, and the destructor waits for it.
std::condition_variable& changed = *new std::condition_variable;  // NOLINT(bugprone-throwing-static-initialization)
// Those that nobody has destroyed. What was aborted stays here, since a thread may be inside, and is no leak.
std::set<Rank*>& ranks() {
  static auto* const all = new std::set<Rank*>;
  return *all;
}
std::map<std::string, World> worlds;
int next_id = 0, aborts = 0, ends = 0, broken = 0;
bool hangs = false, answers_in_progress = false;

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
  std::unique_lock<std::mutex> lock(mutex);
  if (config->magic != 0xcafebeef || config->blocking != 1 || config->version < 21400) return 4;
  World& world = worlds[id.bytes];
  world.calls.resize(static_cast<size_t>(size));
  ++world.joined;
  changed.notify_all();
  *communicator = *ranks().insert(new Rank{&world, rank, size}).first;
  if (answers_in_progress) return 7;
  changed.wait(lock, [&] { return world.joined >= size; });
  return 0;
}
int ncclAllGather(const void* send, void* receive, size_t count, int type, Rank* self, FakeStream* stream) {
  std::unique_lock<std::mutex> lock(mutex);
  if (type != 8) return 4;
  if (hangs) {
    changed.wait(lock, [&] { return self->aborted; });
    return 6;
  }
  stream = fake_stream(stream);
  ++stream->enqueued;
  self->world->calls[static_cast<size_t>(self->rank)].push_back({send, receive, count, stream});
  run_complete(*self->world);
  changed.notify_all();
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
  self->aborted = true;  // and kept: a thread may be inside
  changed.notify_all();
  return 0;
}
int ncclCommFinalize(Rank* self) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return self->aborted || self->world->calls[static_cast<size_t>(self->rank)].empty(); });
  return self->aborted ? 6 : 0;
}
int ncclCommDestroy(Rank* self) {
  const std::scoped_lock lock(mutex);
  ++ends;
  ranks().erase(self);
  delete self;
  return 0;
}
const char* ncclGetErrorString(int result) { return result == 6 ? "remote process exited" : "invalid argument"; }

// For the test.
int fake_nccl_aborts() {
  const std::scoped_lock lock(mutex);
  return aborts;
}
int fake_nccl_ends() {
  const std::scoped_lock lock(mutex);
  return ends;
}
void fake_nccl_hang(int yes) {
  const std::scoped_lock lock(mutex);
  hangs = yes != 0;
}
void fake_nccl_answer_in_progress(int yes) {
  const std::scoped_lock lock(mutex);
  answers_in_progress = yes != 0;
}
void fake_nccl_break(int result) {
  const std::scoped_lock lock(mutex);
  broken = result;
}
}
