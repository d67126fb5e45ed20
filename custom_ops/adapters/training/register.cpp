// RegisterCustomOps of libbnexport_training.so: gives its kernels to libbnexport_ops.so next to it.
#include <dlfcn.h>

#include <cstring>
#include <string>

#include "../definition.h"
#include "../training_library.h"

namespace {

using namespace bnexport::adapters;

constexpr const char* kOperators = "libbnexport_ops.so";

template <class Function>
Function resolve(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

void lend() {
  Dl_info self{};
  if (dladdr(reinterpret_cast<const void*>(&lend), &self) == 0 || self.dli_fname == nullptr) self.dli_fname = "";
  const std::string own = self.dli_fname;
  const std::string path = own.substr(0, own.rfind('/') + 1) + kOperators;
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw NodeError("bnexport: " + path + ": cannot be opened (" + dlerror() + "), expected next to " + own +
                    "; put both libraries of one build into one folder");
  }
  const auto version = resolve<decltype(&bnexport_version)>(library, "bnexport_version");
  const auto take = resolve<decltype(&bnexport_lend_training)>(library, "bnexport_lend_training");
  if (version == nullptr || take == nullptr || std::strcmp(version(), BNEXPORT_VERSION) != 0) {
    throw NodeError("bnexport: " + path + ": got version " + (version == nullptr ? "unknown" : version()) +
                    ", expected " + BNEXPORT_VERSION + ", that of " + own +
                    "; put both libraries of one build into one folder");
  }
  take(&training_kernels());
}

}  // namespace

extern "C" {

BNEXPORT_API const char* bnexport_training_version(void) { return BNEXPORT_VERSION; }

BNEXPORT_API ort::Status* RegisterCustomOps(ort::SessionOptions*, const ort::ApiBase* base) {
  return registered(base, [](ort::Api) { lend(); });
}

}  // extern "C"
