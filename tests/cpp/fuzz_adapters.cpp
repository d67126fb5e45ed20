// Bytes as nodes: attributes, shapes and types for the adapters, over a table of ONNX Runtime's functions that
// gives what it is told to give, and structs for the C API. Every tensor is a heap block of exactly its size, so
// that a sanitizer sees each access past the end. Nothing may crash; what runs must leave its outputs finite
// where its inputs are, which the unit tests check: here it only has to end.
//
//   fuzz_adapters [seconds [seed [file]]]     a plain driver; a file is run once
//   with -DBNEXPORT_LIBFUZZER and clang's -fsanitize=fuzzer: libFuzzer's
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../custom_ops/adapters/training_library.h"
#include "bnexport.h"
#include "fake_ort.h"

using namespace fake_ort;

namespace {

// Choices out of bytes; zeros when they run out.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  bool chance(int of256) { return byte() < of256; }
  size_t below(size_t limit) { return byte() % limit; }
  uint64_t word() {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return value;
  }
  int64_t integer() {
    static const int64_t odd[] = {0, 1, 2, -1, 1000000, 1000001, INT32_MAX, INT64_MAX, INT64_MIN, int64_t{1} << 53};
    const uint8_t kind = byte();
    return kind < 128 ? kind % 4 : kind < 230 ? odd[kind % 10] : static_cast<int64_t>(word());
  }
  double number() {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    static const double odd[] = {0, -0.0, 1, 0.1, 1e-5, 1e-300, 1e300, -1, kInfinity, -kInfinity, kNan, 1.0000001};
    const uint8_t kind = byte();
    if (kind < 230) return odd[kind % 12];
    const uint64_t bits = word();
    double value;
    std::memcpy(&value, &bits, 8);
    return value;
  }
  std::string text() {
    static const char* const known[] = {"", "exact", "default", "N", "local", "mean", "sum", "echo", "broken", "world"};
    if (chance(220)) return known[below(10)];
    std::string value(below(80), '\0');
    for (char& character : value) character = static_cast<char>(byte());
    return value;
  }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

// A block of exactly this size; what is read of it is at least initialised.
std::unique_ptr<unsigned char[]> block(Bytes& bytes, int64_t size) {
  auto data = std::make_unique<unsigned char[]>(static_cast<size_t>(size));
  const uint8_t value = bytes.chance(200) ? 0x3c : bytes.byte();
  if (size > 0) std::memset(data.get(), value, static_cast<size_t>(size));
  return data;
}

int echo(void*, const double* send, double* receive, int64_t count, char*, size_t) {
  std::copy_n(send, count, receive);
  std::copy_n(send, count, receive + count);
  return 0;
}

int broken(void*, const double*, double*, int64_t, char* error, size_t capacity) {
  if (capacity > 0) error[0] = '\0';
  return 1;
}

void prepare() {
  static const bool once = [] {
    static const ort::ApiBase base{[](uint32_t) { return table(); }, [] { return "1.99.0"; }};
    if (RegisterCustomOps(nullptr, &base) != nullptr || registered().empty()) std::abort();
    bnexport_lend_training(&bnexport::adapters::training_kernels());
    char error[200];
    if (bnexport_register_group("echo", 2, 0, echo, nullptr, error, sizeof(error)) != 0) std::abort();
    if (bnexport_register_group("broken", 2, 1, broken, nullptr, error, sizeof(error)) != 0) std::abort();
    return true;
  }();
  static_cast<void>(once);
}

// A shape that a tensor can have: few elements, or none of them and sizes as large as they get.
std::vector<int64_t> random_shape(Bytes& bytes) {
  std::vector<int64_t> shape(bytes.chance(220) ? 2 + bytes.below(3) : bytes.below(9));
  for (int64_t& size : shape) size = static_cast<int64_t>(bytes.chance(220) ? 1 + bytes.below(7) : bytes.below(40));
  if (bytes.chance(10) && shape.size() > 1) {
    shape[bytes.below(shape.size())] = 0;
    // Smaller sizes would have their buffers made, which a sanitizer ends where memory cannot hold them.
    shape[bytes.below(shape.size())] = bytes.chance(128) ? INT64_MAX : int64_t{1} << 62;
  }
  if (elements(shape) > kMostElements || elements(shape) < 0) shape.assign(shape.size(), 2);
  return shape;
}

// The kernel of a node; null where its attributes are refused.
struct Made {
  explicit Made(const Node& node) : op(node.op) {
    is_done(op->create_kernel_v2(op, table(), reinterpret_cast<const ort::KernelInfo*>(&node), &made));
  }
  ~Made() {
    if (made != nullptr) op->destroy(made);
  }
  Made(const Made&) = delete;
  Made& operator=(const Made&) = delete;
  bool runs(Node& node) const { return is_done(op->compute_v2(made, reinterpret_cast<ort::KernelContext*>(&node))); }

  const ort::CustomOp* op;
  void* made = nullptr;

 private:
  static bool is_done(ort::Status* failed) {
    delete reinterpret_cast<Message*>(failed);
    return failed == nullptr;
  }
};

// The operators of a training step: sizes that fit together, but for a few.
struct Window {
  int64_t batch, groups, ins, outs;
  std::vector<int64_t> in, out, kernel, stride, padding, dilation;

  explicit Window(Bytes& bytes) {
    const size_t rank = 1 + bytes.below(2);
    for (int64_t* size : {&batch, &groups, &ins, &outs}) *size = static_cast<int64_t>(1 + bytes.below(4));
    if (bytes.chance(20)) batch = 0;
    for (size_t i = 0; i < rank; ++i) {
      kernel.push_back(static_cast<int64_t>(1 + bytes.below(3)));
      stride.push_back(static_cast<int64_t>(1 + bytes.below(3)));
      padding.push_back(static_cast<int64_t>(bytes.below(3)));
      dilation.push_back(static_cast<int64_t>(1 + bytes.below(2)));
      in.push_back(dilation[i] * (kernel[i] - 1) + 1 + static_cast<int64_t>(bytes.below(20)));
      out.push_back((in[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) / stride[i] + 1);
    }
  }
  static std::vector<int64_t> shape(int64_t a, int64_t b, const std::vector<int64_t>& rest) {
    std::vector<int64_t> made{a, b};
    made.insert(made.end(), rest.begin(), rest.end());
    return made;
  }
  std::vector<int64_t> x() const { return shape(batch, groups * ins, in); }
  std::vector<int64_t> y() const { return shape(batch, groups * outs, out); }
  std::vector<int64_t> weight() const { return shape(groups * outs, ins, kernel); }
};

std::vector<std::vector<int64_t>> shapes_of(const std::string& op, const Window& w) {
  if (op == "Conv") return {w.x(), w.weight(), {w.groups * w.outs}};
  if (op == "ConvInputGrad") return {w.y(), w.weight()};
  if (op == "ConvWeightGrad") return {w.y(), w.x()};
  if (op == "MaxPoolGrad") return {Window::shape(w.batch, w.groups * w.ins, w.out), w.x()};
  if (op == "AdamUpdate") return {w.x(), w.x(), w.x(), w.x(), w.x(), {}, {}, {}};
  if (op == "SgdUpdate") return {w.x(), w.x(), w.x(), {}, {}};
  return {w.x(), w.x()};
}

bool fuzz_training_node(Bytes& bytes, const ort::CustomOp* op) {
  const Window window(bytes);
  Node node;
  node.op = op;
  node.name = "n";
  node.fails = bytes.chance(4);
  const auto add = [&](const char* name, int kind) -> Attribute& {
    Attribute attribute;
    attribute.kind = bytes.chance(250) ? kind : static_cast<int>(bytes.below(6));
    attribute.number = static_cast<float>(bytes.chance(220) ? 0.1 : bytes.number());
    attribute.integer = bytes.chance(220) ? 1 : bytes.integer();
    node.attributes.emplace_back(name, attribute);
    return node.attributes.back().second;
  };
  const std::pair<const char*, const std::vector<int64_t>*> lists[] = {{"kernel_shape", &window.kernel},
                                                                       {"input_shape", &window.in},
                                                                       {"strides", &window.stride},
                                                                       {"pads", &window.padding},
                                                                       {"dilations", &window.dilation}};
  for (const auto& [name, values] : lists) {
    Attribute& attribute = add(name, 4);
    attribute.integers = *values;
    if (bytes.chance(8)) attribute.integers[bytes.below(attribute.integers.size())] = bytes.integer();
    if (bytes.chance(4)) attribute.integers.resize(bytes.below(5), 1);
  }
  Attribute& group = add("group", 2);
  if (bytes.chance(250)) group.integer = window.groups;
  for (const char* name :
       {"low", "high", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "weight_decay", "momentum"}) {
    if (bytes.chance(240)) add(name, 1);
  }
  add("nesterov", 2);
  const Made kernel(node);
  if (kernel.made == nullptr) return false;
  for (const std::vector<int64_t>& shape : shapes_of(op->name(op), window)) {
    auto tensor = std::make_unique<Tensor>();
    tensor->shape = bytes.chance(6) ? random_shape(bytes) : shape;
    const int64_t count = elements(tensor->shape);
    if (count < 0 || count > kMostElements || bytes.chance(4)) tensor = nullptr;
    if (tensor != nullptr && count > 0) tensor->data = block(bytes, count * 4);
    node.inputs.push_back(std::move(tensor));
  }
  for (size_t i = 0; i < op->output_count(op); ++i) {
    node.outputs.push_back(op->output_presence(op, i) == ort::kRequired || bytes.chance(128));
  }
  return kernel.runs(node);
}

bool fuzz_node(Bytes& bytes) {
  const ort::CustomOp* op = registered()[bytes.below(registered().size())];
  if (std::strncmp(op->name(op), "MMCV", 4) != 0) return fuzz_training_node(bytes, op);
  Node node;
  node.op = op;
  node.name = bytes.chance(200) ? "n" : bytes.text();
  node.fails = bytes.chance(4);
  for (const char* name : {"momentum", "eps", "group", "group_size", "training_mode", "stats_mode", "grad_reduction"}) {
    if (bytes.chance(150)) continue;
    Attribute attribute;
    const std::string known = name;
    const bool is_float = known == "momentum" || known == "eps";
    const bool is_integer = known == "group_size" || known == "training_mode";
    attribute.kind = bytes.chance(240) ? (is_float ? 1 : is_integer ? 2 : 3) : static_cast<int>(1 + bytes.below(5));
    attribute.number = static_cast<float>(bytes.chance(220) ? 0.1 : bytes.number());
    attribute.integer = bytes.chance(220) ? static_cast<int64_t>(bytes.below(3)) : bytes.integer();
    attribute.text = bytes.text();
    node.attributes.emplace_back(name, attribute);
  }
  const Made kernel(node);
  if (kernel.made == nullptr) return false;
  const std::vector<int64_t> shape = random_shape(bytes);
  const bool backward = std::string(op->name(op)).find("Grad") != std::string::npos;
  node.inputs.resize(bytes.chance(230) ? 5 : bytes.below(6));
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (bytes.chance(20)) continue;
    auto tensor = std::make_unique<Tensor>();
    const bool is_data = i == 0 || (backward && i == 1);
    tensor->shape = is_data ? shape : std::vector<int64_t>{shape.size() > 1 ? shape[1] : 1};
    if (bytes.chance(8)) tensor->shape = random_shape(bytes);
    const int64_t count = elements(tensor->shape);
    if (count > kMostElements || count < 0) continue;
    if (count > 0) tensor->data = block(bytes, count * width(op->input_type(op, i)));
    node.inputs[i] = std::move(tensor);
  }
  node.outputs.resize(bytes.chance(230) ? 5 : 1 + bytes.below(5));
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    // ONNX Runtime refuses a node without a required output; the gradient has nothing to put into 1 and 2.
    const bool required = op->output_presence(op, i) == ort::kRequired;
    const bool huge = shape.size() > 1 && shape[1] > kMostElements && bytes.chance(230);
    node.outputs[i] = required || (!huge && bytes.chance(backward && (i == 1 || i == 2) ? 10 : 230));
  }
  return kernel.runs(node);
}

// ---- the C API

// A pointer to a block of so many bytes, or NULL; the block is kept in `keep`.
void* pointer(Bytes& bytes, std::vector<std::unique_ptr<unsigned char[]>>& keep, int64_t size, int null_of256) {
  if (bytes.chance(null_of256)) return nullptr;
  keep.push_back(block(bytes, size));
  return keep.back().get();
}

template <class Params>
void common(Bytes& bytes, Params& p) {
  p.struct_size = bytes.chance(250) ? sizeof(p) : static_cast<uint32_t>(bytes.integer());
  p.dtype = bytes.chance(250) ? static_cast<int32_t>(bytes.below(4)) : static_cast<int32_t>(bytes.integer());
  p.stats_dtype = bytes.chance(250) ? (bytes.chance(128) ? 0 : 3) : static_cast<int32_t>(bytes.integer());
  p.layout = bytes.chance(250) ? static_cast<int32_t>(bytes.below(2)) : static_cast<int32_t>(bytes.integer());
  p.training = bytes.chance(250) ? static_cast<int32_t>(bytes.below(2)) : static_cast<int32_t>(bytes.integer());
  p.stats_mode = bytes.chance(250) ? static_cast<int32_t>(bytes.below(3)) : static_cast<int32_t>(bytes.integer());
  p.group_size = bytes.chance(250) ? static_cast<int64_t>(1 + bytes.below(3)) : bytes.integer();
  p.threads = bytes.chance(250) ? static_cast<int32_t>(1 + bytes.below(3)) : static_cast<int32_t>(bytes.integer());
  for (int64_t* size : {&p.N, &p.C, &p.S}) *size = static_cast<int64_t>(bytes.below(24));
  if (bytes.chance(12)) {
    // No elements, or a negative size, and one as large as it gets.
    int64_t* const sizes[] = {&p.N, &p.C, &p.S};
    *sizes[bytes.below(3)] = bytes.chance(128) ? 0 : -1;
    *sizes[bytes.below(3)] = bytes.chance(128) ? INT64_MAX : int64_t{1} << 62;
  }
  if (p.group_size > 3 && p.group_size <= 1000000) p.group_size = 3;
}

// fill(params, data, vector, doubles) sets what one direction has alone; each of the three makes a block, or NULL.
template <class Params, class Fill>
bool fuzz_call(Bytes& bytes, int (*moments)(const Params*, double*, char*, size_t),
               int (*run)(const Params*, char*, size_t), const Fill& fill) {
  char error[256];
  const size_t capacity = bytes.chance(240) ? sizeof(error) : bytes.below(3);
  std::vector<std::unique_ptr<unsigned char[]>> keep;
  Params p{};
  common(bytes, p);
  const int64_t C = std::min<int64_t>(std::max<int64_t>(p.C, 0), 1 << 10), row_size = 2 * C + 1;
  const int64_t count = p.N >= 0 && p.C >= 0 && p.S >= 0 ? std::max<int64_t>(elements({p.N, p.C, p.S}), 0) : 0;
  const int64_t item = p.dtype == BNEXPORT_FLOAT64 ? 8 : p.dtype == BNEXPORT_FLOAT32 ? 4 : 2;
  const int64_t statistic = p.stats_dtype == BNEXPORT_FLOAT64 ? 8 : 4;
  if (count > kMostElements) return false;
  const auto data = [&](int null) { return pointer(bytes, keep, count * item, null); };
  const auto vector = [&](int null) { return pointer(bytes, keep, C * statistic, null); };
  const auto doubles = [&](int64_t size, int null) {
    return static_cast<double*>(pointer(bytes, keep, size * 8, null));
  };
  p.x = data(4);
  p.weight = vector(60);
  p.gathered = doubles((p.group_size > 3 ? 1 : std::max<int64_t>(p.group_size, 1)) * row_size, 20);
  fill(p, C, data, vector, doubles);
  double* const row = doubles(row_size, 10);
  const Params* params = bytes.chance(2) ? nullptr : &p;
  return (bytes.chance(80) ? moments(params, row, error, capacity) : run(params, error, capacity)) == 0;
}

bool fuzz_capi(Bytes& bytes) {
  if (bytes.chance(128)) {
    return fuzz_call(bytes, bnexport_cpu_moments, bnexport_cpu_forward,
                     [&](bnexport_forward& p, int64_t C, const auto& data, const auto& vector, const auto& doubles) {
                       p.y = data(4);
                       p.bias = vector(60);
                       p.running_mean = vector(40);
                       p.running_var = vector(40);
                       p.running_mean_out = vector(100);
                       p.running_var_out = vector(100);
                       p.saved_mean = doubles(C, 60);
                       p.saved_invstd = doubles(C, 60);
                       p.momentum = bytes.chance(220) ? 0.1 : bytes.number();
                       p.eps = bytes.chance(220) ? 1e-5 : bytes.number();
                     });
  }
  return fuzz_call(bytes, bnexport_cpu_backward_moments, bnexport_cpu_backward,
                   [&](bnexport_backward& p, int64_t C, const auto& data, const auto& vector, const auto& doubles) {
                     p.grad_reduction = static_cast<int32_t>(bytes.chance(250) ? bytes.below(3) : bytes.integer());
                     p.dy = data(4);
                     p.dx = data(40);
                     p.saved_mean = doubles(C, 8);
                     p.saved_invstd = doubles(C, 8);
                     p.dweight = vector(60);
                     p.dbias = vector(60);
                     p.local_moments = doubles(2 * C + 1, 20);
                   });
}

// Whether the input was accepted.
bool one_input(const uint8_t* data, size_t size) {
  prepare();
  Bytes bytes(data, size);
  return bytes.chance(128) ? fuzz_node(bytes) : fuzz_capi(bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  one_input(data, size);
  return 0;
}

#if !defined(BNEXPORT_LIBFUZZER)

// NOLINTNEXTLINE(bugprone-reserved-identifier): the sanitizers' own name.
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace {

const std::vector<uint8_t>* current = nullptr;

// The input at hand, when a sanitizer ends the process.
void save() {
  if (FILE* file = current == nullptr ? nullptr : std::fopen("fuzz_adapters.input", "wb")) {
    std::fwrite(current->data(), 1, current->size(), file);
    std::fclose(file);
    std::fprintf(stderr, "the input is in fuzz_adapters.input\n");
  }
}

}  // namespace

int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::strtod(arguments[1], nullptr) : 5;
  const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  if (count > 3) {
    std::ifstream file(arguments[3], std::ios::binary);
    const std::vector<char> data((std::istreambuf_iterator<char>(file)), {});
    std::printf("%s\n", one_input(reinterpret_cast<const uint8_t*>(data.data()), data.size()) ? "accepted" : "refused");
    return 0;
  }
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(save);
  std::mt19937_64 random(seed);
  const auto start = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  std::vector<std::vector<uint8_t>> pool;
  int64_t inputs = 0, accepted = 0;
  while (passed() < seconds) {
    std::vector<uint8_t> data;
    if (!pool.empty() && random() % 2 == 0) {
      data = pool[random() % pool.size()];
      for (uint64_t i = 0, changes = 1 + random() % 6; i < changes; ++i) {
        data[random() % data.size()] = static_cast<uint8_t>(random());
      }
    } else {
      data.resize(16 + random() % 240);
      for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
    }
    current = &data;
    const double begin = passed();
    if (one_input(data.data(), data.size())) {
      ++accepted;
      if (pool.size() < 500) {
        pool.push_back(data);
      } else {
        pool[random() % pool.size()] = data;
      }
    }
    ++inputs;
    if (passed() - begin > 10) {
      std::fprintf(stderr, "an input took %.1f s\n", passed() - begin);
      save();
      return 1;
    }
  }
  std::printf("adapters: %lld inputs, %lld accepted, %.1f s, %.0f a second, seed %llu\n",
              static_cast<long long>(inputs), static_cast<long long>(accepted), passed(),
              static_cast<double>(inputs) / passed(), static_cast<unsigned long long>(seed));
  return 0;
}

#endif  // BNEXPORT_LIBFUZZER
