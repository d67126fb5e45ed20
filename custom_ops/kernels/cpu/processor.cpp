#include "processor.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#if defined(BNEXPORT_X86)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace bnexport::cpu {

namespace {

#if defined(BNEXPORT_X86)
// Registers whose state the system saves (XCR0): bits 1 and 2 for AVX, 5 to 7 for AVX-512.
__attribute__((target("xsave"))) uint64_t saved_registers() { return static_cast<uint64_t>(_xgetbv(0)); }

// cpuid itself: the run-time library of zig, which wheels are built with, says no to every __builtin_cpu_supports.
InstructionSet widest() {
  constexpr unsigned kOsxsave = 1U << 27;
  constexpr unsigned kFmaF16c = 1U << 12 | 1U << 29;
  constexpr unsigned kAvx2 = 1U << 5;
  constexpr unsigned kAvx512 = 1U << 16 | 1U << 17 | 1U << 30 | 1U << 31;  // F, DQ, BW, VL
  constexpr uint64_t kSaveAvx = 0x06;
  constexpr uint64_t kSaveAvx512 = 0xE6;
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsxsave) == 0) return InstructionSet::kBaseline;
  const bool has_fma = (ecx & kFmaF16c) == kFmaF16c;
  const uint64_t saved = saved_registers();
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return InstructionSet::kBaseline;
  if (!has_fma || (ebx & kAvx2) == 0 || (saved & kSaveAvx) != kSaveAvx) return InstructionSet::kBaseline;
  return (ebx & kAvx512) == kAvx512 && (saved & kSaveAvx512) == kSaveAvx512 ? InstructionSet::kAvx512
                                                                            : InstructionSet::kAvx2;
}
#endif

InstructionSet best() {
#if defined(BNEXPORT_X86)
  const char* limit = std::getenv("BNEXPORT_ISA");
  const auto allowed = [&](const char* name) {
    if (limit == nullptr || *limit == '\0' || std::strcmp(limit, "avx512") == 0) return true;
    return std::strcmp(limit, name) == 0;
  };
  const InstructionSet found = widest();
  if (found == InstructionSet::kAvx512 && allowed("avx512")) return found;
  if (found != InstructionSet::kBaseline && allowed("avx2")) return InstructionSet::kAvx2;
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

// A last level of more than this is the sum of many cores' parts: one process gets through it little faster than past
// it. (Xeon with 260 MB, a forward of 25.7 MB in and out with two threads: 2.0 to 2.6 ms through it, 1.3 ms past it.)
constexpr int64_t kMostShared = int64_t{32} << 20;

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
  static const Caches found = {cache_size(2, int64_t{512} << 10),
                               std::min(cache_size(3, int64_t{16} << 20), kMostShared)};
  return found;
}

}  // namespace bnexport::cpu
