// Count, mean and M2 = sum (x - mean)^2 of a set of values, and their merge (Chan, Golub, LeVeque):
//
//   d = mean_b - mean_a      n = n_a + n_b
//   mean = mean_a + d n_b / n
//   M2   = M2_a + M2_b + d^2 n_a n_b / n
//
// The counts are integers kept in doubles (exact to 2^53). Merging in a fixed order gives the same
// bits for any number of threads.
#pragma once

#if defined(__CUDACC__)
#define BNEXPORT_HOST_DEVICE __host__ __device__
#else
#define BNEXPORT_HOST_DEVICE
#endif

// Included by files that are compiled for several instruction sets: a shared out-of-line copy could
// be the one for a processor that is not there.
#if defined(__GNUC__)
#define BNEXPORT_ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define BNEXPORT_ALWAYS_INLINE inline
#endif

namespace bnexport {

struct Moments {
  double count = 0;
  double mean = 0;
  double m2 = 0;

  BNEXPORT_HOST_DEVICE BNEXPORT_ALWAYS_INLINE void merge(const Moments& other) {
    if (other.count == 0) return;
    if (count == 0) {
      *this = other;
      return;
    }
    const double total = count + other.count;
    const double delta = other.mean - mean;
    const double share = other.count / total;
    mean += delta * share;
    m2 += other.m2 + delta * delta * count * share;
    count = total;
  }
};

}  // namespace bnexport
