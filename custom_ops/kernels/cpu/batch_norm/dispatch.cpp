#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "../training/table.h"
#include "plan.h"
#include "table.h"

namespace bnexport::cpu {

struct Loops;

extern const Table tables_baseline[4];
extern const TrainingTable training_table_baseline;
extern const Loops loops_baseline;
#if defined(BNEXPORT_X86)
extern const Table tables_avx2[4];
extern const TrainingTable training_table_avx2;
extern const Loops loops_avx2;
extern const Table tables_avx512[4];
extern const TrainingTable training_table_avx512;
extern const Loops loops_avx512;
#endif

namespace {

struct Choice {
  const char* name;
  const Table* tables;
  const TrainingTable* training;
  const Loops* loops;
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
    return {"avx512", tables_avx512, &training_table_avx512, &loops_avx512};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
      allowed("avx2")) {
    return {"avx2", tables_avx2, &training_table_avx2, &loops_avx2};
  }
#endif
  return {"baseline", tables_baseline, &training_table_baseline, &loops_baseline};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
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

Caches caches() {
  static const Caches found = {cache_size(2, int64_t{512} << 10), cache_size(3, int64_t{16} << 20)};
  return found;
}

const Table& table(int32_t dtype) { return choice().tables[dtype]; }
const TrainingTable& training_table() { return *choice().training; }
const Loops& loops() { return *choice().loops; }
const char* instruction_set() { return choice().name; }

}  // namespace bnexport::cpu
