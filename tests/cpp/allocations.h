// Fails where a task of the kernels allocates: an exception there would end the process, since nothing may unwind
// through the threads of ONNX Runtime or OpenMP. Include it in one file of a program.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <new>

inline thread_local bool allocation_forbidden = false;

struct NoAllocation {
  NoAllocation() { allocation_forbidden = true; }
  ~NoAllocation() { allocation_forbidden = false; }
  NoAllocation(const NoAllocation&) = delete;
  NoAllocation& operator=(const NoAllocation&) = delete;
};

inline void* allocate(size_t bytes) {
  if (allocation_forbidden) {
    std::fputs("a task allocates memory\n", stderr);
    std::abort();
  }
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
