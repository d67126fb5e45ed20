// The NCCL communicator against a libnccl whose ranks are threads (fake_nccl.cpp): results, and that
// everything which would hang ends in an error. The path of the fake library is the first argument.
#include "../../custom_ops/comm/nccl.h"

#include <dlfcn.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
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

// A function of the fake library for its tests.
template <class Result, class... Arguments>
Result fake(const char* name, Arguments... arguments) {
  return reinterpret_cast<Result (*)(Arguments...)>(dlsym(dlopen(library.c_str(), RTLD_NOW), name))(arguments...);
}

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
    std::this_thread::sleep_for(std::chrono::milliseconds(120));  // the watchdog looks every 100
  }
  CHECK(fake_events_made - before <= 6);
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
    double value = 1, received[2] = {5, 5};
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // elsewhere
      return;
    }
    communicator.all_gather(&value, received, 1, &streams[0]);
    communicator.require_healthy();
    wait(streams[0]);                                           // ends because the communicator is aborted
    CHECK(std::isnan(received[0]) && std::isnan(received[1]));  // not what the memory held before
    CHECK(contains(error_of([&] { communicator.require_healthy(); }), "did not end within"));
    const std::string error = error_of([&] { communicator.all_gather(&value, received, 1, &streams[0]); });
    CHECK(contains(error, "did not end within") && contains(error, "rank 0 of 2"));
  });
}

void time_before_a_gather_starts_does_not_count() {
  const Id id;
  FakeStream stream;
  NcclCommunicator communicator(library, 1, 0, id.bytes, 0.3);
  double value = 1, received = 0;
  stream.enqueued += 2;  // work that takes longer than the timeout
  communicator.all_gather(&value, &received, 1, &stream);
  std::this_thread::sleep_for(std::chrono::milliseconds(900));
  stream.done += 2;
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  communicator.require_healthy();
}

void a_peer_that_never_joins_ends_in_an_error() {
  const Id id;
  const int aborts = fake<int>("fake_nccl_aborts");
  const std::string error = error_of([&] { NcclCommunicator(library, 2, 0, id.bytes, 0.2); });
  CHECK(contains(error, "joining the group did not end within"));
  // The peer comes after all: nobody uses what the first one gets.
  const NcclCommunicator late(library, 2, 1, id.bytes, 10);
  for (int i = 0; i < 100 && fake<int>("fake_nccl_aborts") == aborts; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(fake<int>("fake_nccl_aborts") == aborts + 1);
}

void joining_waits_while_nccl_says_in_progress() {
  const Id id;
  fake<void>("fake_nccl_answer_in_progress", 1);
  on_ranks(2, [&](int64_t rank) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    NcclCommunicator(library, 2, rank, id.bytes, 10).require_healthy();
  });
  fake<void>("fake_nccl_answer_in_progress", 0);
}

void a_call_that_hangs_ends_in_an_error() {
  const Id id;
  FakeStream stream;
  NcclCommunicator communicator(library, 1, 0, id.bytes, 0.3);
  double value = 1, received = 0;
  fake<void>("fake_nccl_hang", 1);
  const std::string error = error_of([&] { communicator.all_gather(&value, &received, 1, &stream); });
  fake<void>("fake_nccl_hang", 0);
  CHECK(contains(error, "enqueuing an all-gather did not end within"));
}

void a_healthy_group_is_finalized() {
  const Id id;
  const int aborts = fake<int>("fake_nccl_aborts"), ends = fake<int>("fake_nccl_ends");
  on_ranks(2, [&](int64_t rank) {
    FakeStream stream;
    NcclCommunicator communicator(library, 2, rank, id.bytes, 10);
    double value = 1, received[2] = {};
    communicator.all_gather(&value, received, 1, &stream);
  });
  CHECK(fake<int>("fake_nccl_aborts") == aborts && fake<int>("fake_nccl_ends") == ends + 2);
}

void leaving_does_not_wait_for_a_peer_that_is_gone() {
  const Id id;
  FakeStream stream;
  const int aborts = fake<int>("fake_nccl_aborts");
  on_ranks(2, [&](int64_t rank) {
    auto communicator = std::make_unique<NcclCommunicator>(library, 2, rank, id.bytes, 0.5);
    if (rank == 1) return;
    double value = 1, received[2] = {};
    communicator->all_gather(&value, received, 1, &stream);
    communicator.reset();
  });
  CHECK(fake<int>("fake_nccl_aborts") == aborts + 1);
}

void an_error_of_nccl_is_passed_on() {
  const Id id;
  FakeStream stream;
  NcclCommunicator communicator(library, 1, 0, id.bytes, 10);
  double value = 1, received = 0;
  communicator.all_gather(&value, &received, 1, &stream);
  fake<void>("fake_nccl_break", 6);
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  fake<void>("fake_nccl_break", 0);
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
  time_before_a_gather_starts_does_not_count();
  a_peer_that_never_joins_ends_in_an_error();
  joining_waits_while_nccl_says_in_progress();
  a_call_that_hangs_ends_in_an_error();
  a_healthy_group_is_finalized();
  leaving_does_not_wait_for_a_peer_that_is_gone();
  an_error_of_nccl_is_passed_on();
  an_error_of_the_device_is_passed_on();
  a_missing_library_is_named();
  std::puts("nccl: ok");
  return 0;
}
