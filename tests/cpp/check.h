// A test is a function; a failed CHECK prints where and what, and the program exits with 1.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

inline void check(bool holds, const char* file, int line, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
  std::exit(1);
}

#define CHECK(condition) check((condition), __FILE__, __LINE__, #condition)
#define CHECK_NEAR(got, expected, bound)                                                                  \
  do {                                                                                                    \
    const double got_ = (got), expected_ = (expected), bound_ = (bound);                                  \
    check(std::fabs(got_ - expected_) <= bound_, __FILE__, __LINE__,                                      \
          #got ": got " + std::to_string(got_) + ", expected " + std::to_string(expected_) + " within " + \
              std::to_string(bound_));                                                                    \
  } while (0)
