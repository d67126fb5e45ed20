#include <cstdlib>
#include <cstring>

#include "table.h"

namespace bnexport::cpu {

extern const Table tables_baseline[4];
#if defined(BNEXPORT_X86)
extern const Table tables_avx2[4];
extern const Table tables_avx512[4];
#endif

namespace {

struct Choice {
  const char* name;
  const Table* tables;
};

Choice choose() {
#if defined(BNEXPORT_X86)
  const char* limit = std::getenv("BNEXPORT_ISA");
  const auto allowed = [&](const char* name) {
    if (limit == nullptr || *limit == '\0' || std::strcmp(limit, "avx512") == 0) return true;
    return std::strcmp(limit, name) == 0;
  };
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && allowed("avx512")) {
    return {"avx512", tables_avx512};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
      allowed("avx2")) {
    return {"avx2", tables_avx2};
  }
#endif
  return {"baseline", tables_baseline};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

const Table& table(int32_t dtype) { return choice().tables[dtype]; }
const char* instruction_set() { return choice().name; }

}  // namespace bnexport::cpu
