// The NCCL communicator against a libnccl whose ranks are threads (fake_nccl.cpp): results, and that
// everything which would hang ends in an error. The path of the fake library is the first argument.
#include "../../custom_ops/comm/nccl.h"

#include <dlfcn.h>

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda_runtime_api.h"

using bnexport::comm::NcclCommunicator;
using bnexport::comm::NcclError;

namespace {

std::string library;

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const NcclError& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

struct Id {
  char bytes[bnexport::comm::kNcclIdBytes];
  Id() { bnexport::comm::nccl_unique_id(library, bytes); }
};

void on_ranks(int64_t size, const std::function<void(int64_t)>& body) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(size));
  for (int64_t rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

void wait(const FakeStream& stream) {
  while (stream.done < stream.enqueued) std::this_thread::yield();
}

void gathers_in_rank_order() {
  const Id id;
  on_ranks(3, [&](int64_t rank) {
    FakeStream stream;
    NcclCommunicator communicator(library, 3, rank, id.bytes, 10);
    for (int round = 0; round < 200; ++round) {
      const double send[2] = {static_cast<double>(rank), static_cast<double>(round)};
      double receive[6] = {};
      communicator.all_gather(send, receive, 2, &stream);
      wait(stream);
      for (int64_t r = 0; r < 3; ++r) {
        CHECK(receive[2 * r] == static_cast<double>(r));
        CHECK(receive[2 * r + 1] == round);
      }
    }
  });
  CHECK(fake_events_alive == 0);
}

void events_are_reused() {
  const Id id;
  FakeStream stream;
  NcclCommunicator communicator(library, 1, 0, id.bytes, 10);
  double value = 1, received = 0;
  const int before = fake_events_made;
  for (int round = 0; round < 10; ++round) {
    communicator.all_gather(&value, &received, 1, &stream);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the watchdog wakes with each call
  }
  CHECK(fake_events_made - before <= 3);
  CHECK(received == 1);
}

void a_captured_collective_is_not_watched() {
  const Id id;
  FakeStream stream;
  stream.capturing = true;
  NcclCommunicator communicator(library, 1, 0, id.bytes, 10);
  double value = 1, received = 0;
  const int before = fake_events_made;
  communicator.all_gather(&value, &received, 1, &stream);
  CHECK(fake_events_made == before);
}

void a_missing_peer_ends_in_an_error() {
  const Id id;
  FakeStream streams[2];
  on_ranks(2, [&](int64_t rank) {
    NcclCommunicator communicator(library, 2, rank, id.bytes, 0.4);
    double value = 1, received[2] = {};
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // elsewhere
      return;
    }
    communicator.all_gather(&value, received, 1, &streams[0]);
    wait(streams[0]);  // ends because the communicator is aborted
    const std::string error = error_of([&] { communicator.all_gather(&value, received, 1, &streams[0]); });
    CHECK(contains(error, "did not end within") && contains(error, "rank 0 of 2"));
  });
}

void a_peer_that_never_joins_ends_in_an_error() {
  const Id id;
  const int aborts = reinterpret_cast<int (*)()>(dlsym(dlopen(library.c_str(), RTLD_NOW), "fake_nccl_aborts"))();
  const std::string error = error_of([&] { NcclCommunicator(library, 2, 0, id.bytes, 0.2); });
  CHECK(contains(error, "joining the group did not end within"));
  CHECK(reinterpret_cast<int (*)()>(dlsym(dlopen(library.c_str(), RTLD_NOW), "fake_nccl_aborts"))() == aborts + 1);
}

void an_error_of_nccl_is_passed_on() {
  const Id id;
  const auto break_it = reinterpret_cast<void (*)(int)>(dlsym(dlopen(library.c_str(), RTLD_NOW), "fake_nccl_break"));
  FakeStream stream;
  NcclCommunicator communicator(library, 1, 0, id.bytes, 10);
  double value = 1, received = 0;
  communicator.all_gather(&value, &received, 1, &stream);
  break_it(6);
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  break_it(0);
  CHECK(contains(error_of([&] { communicator.all_gather(&value, &received, 1, &stream); }), "remote process exited"));
}

void an_error_of_the_device_is_passed_on() {
  const Id id;
  FakeStream stream;
  NcclCommunicator communicator(library, 1, 0, id.bytes, 10);
  double value = 1, received = 0;
  stream.broken = true;
  communicator.all_gather(&value, &received, 1, &stream);
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  CHECK(contains(error_of([&] { communicator.all_gather(&value, &received, 1, &stream); }), "launch failure"));
}

void a_missing_library_is_named() {
  const std::string missing = error_of([] { bnexport::comm::nccl_version("/nowhere/libnccl.so.2"); });
  CHECK(contains(missing, "/nowhere/libnccl.so.2: cannot be opened") && contains(missing, "install"));
  CHECK(contains(error_of([] { bnexport::comm::nccl_version("libm.so.6"); }), "has no ncclGetVersion"));
  CHECK(bnexport::comm::nccl_version(library) == 22703);
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  library = argv[1];
  gathers_in_rank_order();
  events_are_reused();
  a_captured_collective_is_not_watched();
  a_missing_peer_ends_in_an_error();
  a_peer_that_never_joins_ends_in_an_error();
  an_error_of_nccl_is_passed_on();
  an_error_of_the_device_is_passed_on();
  a_missing_library_is_named();
  std::puts("nccl: ok");
  return 0;
}
