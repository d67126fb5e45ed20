#include "processor.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace bnexport::cpu {

namespace {

InstructionSet best() {
#if defined(BNEXPORT_X86)
  const char* limit = std::getenv("BNEXPORT_ISA");
  const auto allowed = [&](const char* name) {
    if (limit == nullptr || *limit == '\0' || std::strcmp(limit, "avx512") == 0) return true;
    return std::strcmp(limit, name) == 0;
  };
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && allowed("avx512")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
      allowed("avx2")) {
    return InstructionSet::kAvx2;
  }
#endif
  return InstructionSet::kBaseline;
}

// In bytes. sysconf(_SC_LEVEL3_CACHE_SIZE) counts all sockets, or ten times too much on some processors.
int64_t cache_size(int level, int64_t otherwise) {
  const std::string path = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(level) + "/size";
  char text[32] = "";
  if (std::FILE* file = std::fopen(path.c_str(), "r")) {
    if (std::fgets(text, sizeof(text), file) == nullptr) text[0] = '\0';
    std::fclose(file);
  }
  char* end = nullptr;
  const long kilobytes = std::strtol(text, &end, 10);
  return *end == 'K' && kilobytes >= 128 && kilobytes <= int64_t{1} << 30 ? int64_t{kilobytes} << 10 : otherwise;
}

}  // namespace

InstructionSet instruction_set() {
  static const InstructionSet chosen = best();
  return chosen;
}

const char* instruction_set_name() {
  constexpr const char* names[] = {"baseline", "avx2", "avx512"};
  return names[static_cast<int>(instruction_set())];
}

Caches caches() {
  static const Caches found = {cache_size(2, int64_t{512} << 10), cache_size(3, int64_t{16} << 20)};
  return found;
}

}  // namespace bnexport::cpu
