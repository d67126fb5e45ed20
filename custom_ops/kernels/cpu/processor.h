// The processor that this runs on: its instruction set, and with it the tables of inner loops, and its caches.
#pragma once

#include <cstdint>

namespace bnexport::cpu {

// Inner loops are compiled once per instruction set, with BNEXPORT_ISA its name (baseline, avx2, avx512) and the
// matching compiler flags. A table of them is defined as BNEXPORT_TABLE(name), and for those who call it declared by
// BNEXPORT_TABLES; BNEXPORT_CHOSEN is the one for this processor.
#define BNEXPORT_CONCAT_(a, b) a##b
#define BNEXPORT_CONCAT(a, b) BNEXPORT_CONCAT_(a, b)
#define BNEXPORT_TABLE(name) BNEXPORT_CONCAT(name##_, BNEXPORT_ISA)
#if defined(BNEXPORT_X86)
#define BNEXPORT_TABLES(Type, name) extern const Type name##_baseline, name##_avx2, name##_avx512
#define BNEXPORT_CHOSEN(name) (*choose(&name##_baseline, &name##_avx2, &name##_avx512))
#else
#define BNEXPORT_TABLES(Type, name) extern const Type name##_baseline
#define BNEXPORT_CHOSEN(name) (name##_baseline)
#endif

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// The best of this processor. The environment variable BNEXPORT_ISA (baseline, avx2, avx512) asks for less; it is read
// once.
InstructionSet instruction_set();
const char* instruction_set_name();

template <class Table>
const Table* choose(const Table* baseline, const Table* avx2, const Table* avx512) {
  const InstructionSet set = instruction_set();
  return set == InstructionSet::kAvx512 ? avx512 : set == InstructionSet::kAvx2 ? avx2 : baseline;
}

// Elements below which waking another thread costs more than it saves. PyTorch takes one thread up to 32768, so that in
// a network of small layers its other threads sleep, and waking one took longer than a layer of 25,000 elements
// (bench_torch_operator.py, 4 x 32 x 14 x 14).
constexpr int64_t kSerial = 40000;
constexpr int64_t kRun = 1 << 16;  // bytes of one stretch of memory that run at full speed

// Bytes of cache: a core's own second level, and what a process can use of the last level, which all share. Output that
// does not fit the latter together with the input is written past the caches.
struct Caches {
  int64_t own, shared;

  // Half of it: the rest holds what neighbours and the next operator need. (12.8 MB in and out with a
  // shared cache of 32 MB: 0.69 to 1.0 ms past the caches, 1.1 to 1.2 ms through them.)
  bool hold(int64_t bytes) const { return bytes <= shared / 2; }
};
Caches caches();

}  // namespace bnexport::cpu
