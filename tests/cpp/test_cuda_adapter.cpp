// The operators of the CUDA provider over a stand-in for the CUDA library and for ONNX Runtime (fake_ort.h): what
// happens to memory, streams and devices when runs overlap. The path of the stand-in is the first argument.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <thread>

#include "bnexport_cuda.h"
#include "check.h"
#include "fake_ort.h"
#include "fake_streams.h"

using namespace fake_ort;

namespace {

std::string library;

template <class Result, class... Arguments>
Result call(const char* name, Arguments... arguments) {
  return reinterpret_cast<Result (*)(Arguments...)>(dlsym(dlopen(library.c_str(), RTLD_NOW), name))(arguments...);
}
template <class Result>
Result fake(const char* name) {
  return call<Result>(name);
}

constexpr int64_t kN = 2, kC = 3, kS = 4, kCount = kN * kC * kS;

std::unique_ptr<Tensor> tensor(std::vector<int64_t> shape, const std::vector<float>& values, int device) {
  auto made = std::make_unique<Tensor>();
  made->shape = std::move(shape);
  made->data = std::make_unique<unsigned char[]>(values.size() * sizeof(float));
  std::memcpy(made->data.get(), values.data(), values.size() * sizeof(float));
  made->memory.device = device;
  return made;
}

const float* values_of(const Node& run, size_t output) {
  return reinterpret_cast<const float*>(run.made[output]->data.get());
}

// A node of a session on CUDA, and its runs.
class Operator {
 public:
  explicit Operator(const char* name, std::vector<std::pair<std::string, Attribute>> attributes = {}) {
    for (const ort::CustomOp* op : registered()) {
      const bool is_cuda = std::string(op->execution_provider(op)) == "CUDAExecutionProvider";
      if (is_cuda && op->name(op) == std::string(name) && op->input_type(op, 0) == ort::kFloat) op_ = op;
    }
    CHECK(op_ != nullptr);
    info_.name = "n";
    info_.op = op_;
    info_.attributes = std::move(attributes);
    CHECK(op_->create_kernel_v2(op_, table(), reinterpret_cast<const ort::KernelInfo*>(&info_), &kernel_) == nullptr);
  }
  ~Operator() { op_->destroy(kernel_); }
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;

  // Value i of the input is offset + i % 5. `node` receives the outputs when its stream has run.
  void run(Node& node, FakeQueue* stream, Arena& arena, float offset) const {
    const int device = stream == nullptr ? 0 : stream->device;
    std::vector<float> x(kCount);
    for (size_t i = 0; i < x.size(); ++i) x[i] = offset + static_cast<float>(i % 5);
    const std::vector<float> statistics(kC, 1.0f);
    node.op = op_;
    node.stream = stream;
    node.arena = &arena;
    const bool backward = std::string(op_->name(op_)) == "MMCVSyncBatchNormGrad";
    node.inputs.push_back(tensor({kN, kC, kS}, x, device));
    if (backward) node.inputs.push_back(tensor({kN, kC, kS}, x, device));
    for (int i = backward ? 2 : 1; i < 5; ++i) node.inputs.push_back(tensor({kC}, statistics, device));
    node.outputs = backward ? std::vector<bool>{true, false, false, true, true} : std::vector<bool>(5, true);
    const std::unique_ptr<Message> failed(as<Message>(op_->compute_v2(kernel_, as<ort::KernelContext>(&node))));
    const std::string expected = node.fails ? "bnexport: ONNX Runtime: cannot allocate an output" : "",
                      got = failed ? failed->text : "";
    check(got == expected, __FILE__, __LINE__, got);
  }

 private:
  const ort::CustomOp* op_ = nullptr;
  Node info_;
  void* kernel_ = nullptr;
};

// The result of `run` alone, on no stream. Arenas and streams outlive the sessions that use them.
Arena alone_arena;
void expect_same(const Operator& op, const Node& got, float offset) {
  Node alone;
  op.run(alone, nullptr, alone_arena, offset);
  for (size_t output = 0; output < 5; ++output) {
    if (alone.made[output] == nullptr) continue;
    const int64_t count = elements(alone.made[output]->shape);
    CHECK(std::memcmp(values_of(alone, output), values_of(got, output), static_cast<size_t>(count) * sizeof(float)) ==
          0);
  }
}

// Two runs of one session on two streams, the second enqueued when the first has returned but not run; then
// their work takes turns.
void runs_on_two_streams_share_no_scratch(const char* name) {
  Arena arena;
  FakeQueue streams[2];
  const Operator op(name);
  Node first, second;
  op.run(first, &streams[0], arena, 0.0f);
  op.run(second, &streams[1], arena, 100.0f);
  for (bool ran = true; ran;) {
    ran = false;
    for (FakeQueue& stream : streams) ran = stream.step() || ran;
  }
  expect_same(op, first, 0.0f);
  expect_same(op, second, 100.0f);
}

void one_stream_uses_its_scratch_again() {
  Arena arena;
  FakeQueue stream;
  const auto before = fake<int64_t>("fake_cuda_waits");
  Node runs[3];
  {
    const Operator op("MMCVSyncBatchNorm");
    for (Node& run : runs) op.run(run, &stream, arena, 1.0f);
    CHECK(arena.pieces() == 1);
    CHECK(fake<int64_t>("fake_cuda_waits") == before);
    stream.finish();
    expect_same(op, runs[2], 1.0f);
  }
  CHECK(arena.used() == 0);
}

// Memory without a stream may go to any: it is given back when its work is done.
void a_run_without_a_stream_waits() {
  Arena arena;
  const Operator op("MMCVSyncBatchNorm");
  const auto before = fake<int64_t>("fake_cuda_waits");
  Node run;
  op.run(run, nullptr, arena, 1.0f);
  CHECK(fake<int64_t>("fake_cuda_waits") == before + 1 && arena.used() == 0);
}

void an_output_that_cannot_be_made_is_an_error() {
  Arena arena;
  FakeQueue stream;
  for (const char* name : {"MMCVSyncBatchNorm", "MMCVSyncBatchNormGrad"}) {
    Node run;
    run.fails = true;
    Operator(name).run(run, &stream, arena, 1.0f);
  }
  CHECK(arena.used() == 0);
}

// The thread's device is what it was, unless that would create a context on a device that nothing uses.
void work_goes_to_the_device_of_the_input() {
  for (const bool used : {true, false}) {
    Arena arena;
    FakeQueue stream;
    const Operator op("MMCVSyncBatchNorm");
    stream.device = 1;
    Node run;
    call<void>("fake_cuda_use_first", used);
    CHECK(fake<int32_t>("fake_cuda_current_device") == 0);
    op.run(run, &stream, arena, 1.0f);
    CHECK(fake<int32_t>("fake_cuda_current_device") == (used ? 0 : 1));
    stream.finish();
    call<void>("fake_cuda_use_first", true);
    expect_same(op, run, 1.0f);
  }
}

void threads_share_a_session() {
  Arena arena;
  FakeQueue streams[4];
  const Operator op("MMCVSyncBatchNorm");
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      FakeQueue& stream = streams[t];
      stream.device = t % 2;
      std::vector<Node> runs(20);
      for (Node& run : runs) {
        op.run(run, &stream, arena, static_cast<float>(t));
        stream.step();
      }
      stream.finish();
      for (const Node& run : runs) expect_same(op, run, static_cast<float>(t));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Gathers what this process sends twice.
int twice(void*, const double* send, double* receive, int64_t count, char*, size_t) {
  for (int64_t i = 0; i < 2 * count; ++i) receive[i] = send[i % count];
  return 0;
}

void rows_go_through_the_host() {
  char error[200] = "";
  CHECK(bnexport_register_group("pair", 2, 0, twice, nullptr, error, sizeof(error)) == 0);
  Arena arena;
  FakeQueue stream;
  const Operator op("MMCVSyncBatchNorm", {{"group", {"pair"}}, {"group_size", {"", 2}}});
  Node run;
  op.run(run, &stream, arena, 1.0f);
  stream.finish();
  expect_same(Operator("MMCVSyncBatchNorm"), run, 1.0f);  // both processes sent the same
}

// Before API 18 nothing is registered for CUDA, and each ONNX Runtime of a process has definitions of its own.
void each_runtime_has_its_definitions() {
  const std::vector<ort::CustomOp const*> first = registered();
  static const std::vector<void*> copy(table(), table() + 400);
  const ort::ApiBase other{[](uint32_t) -> ort::Api { return copy.data(); }, [] { return "1.17.3"; }};
  registered().clear();
  CHECK(RegisterCustomOps(nullptr, &other) == nullptr);
  const auto is_cuda = [](const ort::CustomOp* op) {
    return std::string(op->execution_provider(op)) == "CUDAExecutionProvider";
  };
  CHECK(std::any_of(first.begin(), first.end(), is_cuda));
  CHECK(std::none_of(registered().begin(), registered().end(), is_cuda));
  for (const ort::CustomOp* const op : registered()) {
    CHECK(std::find(first.begin(), first.end(), op) == first.end());
  }
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  library = argv[1];
  setenv("BNEXPORT_CUDA_LIBRARY", library.c_str(), 1);
  const ort::ApiBase base{[](uint32_t) { return table(); }, [] { return "1.30.0"; }};
  CHECK(RegisterCustomOps(nullptr, &base) == nullptr);
  runs_on_two_streams_share_no_scratch("MMCVSyncBatchNorm");
  runs_on_two_streams_share_no_scratch("MMCVSyncBatchNormGrad");
  one_stream_uses_its_scratch_again();
  a_run_without_a_stream_waits();
  an_output_that_cannot_be_made_is_an_error();
  work_goes_to_the_device_of_the_input();
  threads_share_a_session();
  rows_go_through_the_host();
  each_runtime_has_its_definitions();
  std::puts("cuda adapter: ok");
  return 0;
}
