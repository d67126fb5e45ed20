#include "cuda_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "../node.h"

namespace bnexport::adapters {

namespace {

constexpr const char* kFileName = "libbnexport_ops_cuda.so";

std::string path() {
  if (const char* const given = std::getenv("BNEXPORT_CUDA_LIBRARY")) return given;
  Dl_info self{};
  if (dladdr(reinterpret_cast<const void*>(&cuda_library), &self) == 0 || self.dli_fname == nullptr) return "";
  const std::string own = self.dli_fname;
  const size_t slash = own.rfind('/');
  return (slash == std::string::npos ? "" : own.substr(0, slash + 1)) + kFileName;
}

template <class Function>
bool resolve(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  return function != nullptr;
}

const CudaLibrary* open() {
  const std::string file = path();
  void* const handle = file.empty() ? nullptr : dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return nullptr;
  decltype(&bnexport_cuda_abi_version) abi_version = nullptr;
  decltype(&bnexport_cuda_version) version = nullptr;
  auto* const opened = new CudaLibrary();  // for good, as its code is
  bool complete = resolve(handle, "bnexport_cuda_abi_version", abi_version) &&
                  abi_version() == BNEXPORT_CUDA_ABI_VERSION && resolve(handle, "bnexport_cuda_version", version) &&
                  std::strcmp(version(), BNEXPORT_VERSION) == 0;
#define BNEXPORT_RESOLVE(name) complete = complete && resolve(handle, "bnexport_cuda_" #name, opened->name);
  BNEXPORT_CUDA_FUNCTIONS(BNEXPORT_RESOLVE)
#undef BNEXPORT_RESOLVE
  if (complete) return opened;
  delete opened;
  dlclose(handle);
  throw NodeError("bnexport: " + file + ": got a CUDA library of another version than " + BNEXPORT_VERSION +
                  ", expected the one that was built with this library; build both again, or set BNEXPORT_CUDA_LIBRARY "
                  "to nothing to do without");
}

}  // namespace

const CudaLibrary* cuda_library() {
  static const CudaLibrary* const opened = open();
  return opened;
}

}  // namespace bnexport::adapters
