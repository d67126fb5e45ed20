// libtorch_run MODEL.pt SHAPE INPUT OUTPUT
//
// Runs a file that `bnexport.export(..., format="torchscript")` wrote, with libtorch alone. INPUT holds
// float32 values of the given shape, such as 2,3,32,32; all outputs are written to OUTPUT one after
// another as float32, and listed.
#include <torch/script.h>
#include <torch/version.h>

#include <cstdint>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

std::vector<int64_t> parse_shape(const std::string& text) {
  std::vector<int64_t> shape;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    size_t used = 0;
    const long long size = std::stoll(part, &used);
    if (used != part.size() || size < 0) {
      throw std::runtime_error("SHAPE: got " + text + ", expected such as 2,3,32,32");
    }
    shape.push_back(size);
  }
  return shape;
}

at::Tensor read_input(const std::string& path, const std::vector<int64_t>& shape) {
  at::Tensor input = at::empty(shape, at::kFloat);
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto expected = static_cast<std::streamoff>(input.nbytes());
  if (!file || file.tellg() != expected) {
    throw std::runtime_error(path + ": expected a file of " + std::to_string(expected) + " bytes");
  }
  file.seekg(0);
  file.read(static_cast<char*>(input.data_ptr()), expected);
  return input;
}

// Models return a tensor, or tuples, lists and dicts of them.
void write_outputs(const c10::IValue& value, const std::string& name, std::ofstream& file) {
  if (value.isTensor()) {
    const at::Tensor tensor = value.toTensor().to(at::kCPU, at::kFloat).contiguous();
    file.write(static_cast<const char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
    std::cout << name << ": " << tensor.sizes() << "\n";
  } else if (value.isTuple()) {
    int index = 0;
    for (const auto& element : value.toTupleRef().elements()) {
      write_outputs(element, name + "_" + std::to_string(index++), file);
    }
  } else if (value.isList()) {
    int index = 0;
    for (const c10::IValue element : value.toList()) write_outputs(element, name + "_" + std::to_string(index++), file);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) write_outputs(entry.value(), entry.key().toStringRef(), file);
  } else {
    throw std::runtime_error(name + ": expected a tensor, got " + value.tagKind());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: libtorch_run MODEL.pt SHAPE INPUT OUTPUT\n";
    return 2;
  }
  try {
    torch::jit::Module model;
    try {
      model = torch::jit::load(argv[1], at::kCPU);
    } catch (const c10::Error& error) {
      throw std::runtime_error(
          std::string(argv[1]) + ": libtorch " + TORCH_VERSION +
          " cannot load it; a file made by a newer torch needs a libtorch as new: " + error.what_without_backtrace());
    }
    c10::InferenceMode inference;
    // Packs the weights for this processor, which a file for all of them cannot do.
    model = torch::jit::optimize_for_inference(model);
    const at::Tensor input = read_input(argv[3], parse_shape(argv[2]));
    const c10::IValue output = model.forward({input});
    std::ofstream file(argv[4], std::ios::binary);
    write_outputs(output, "output", file);
    if (!file.flush()) throw std::runtime_error(std::string(argv[4]) + ": cannot be written");
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
