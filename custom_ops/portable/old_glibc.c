/* What g++ and its libstdc++ ask of a C library newer than 2.28, for a library that is to run there
 * (cmake/old_glibc.cmake). All of it is hidden: inside the library these names mean the ones below, elsewhere the C
 * library's. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

/* Names of the C library are the point of this file. */
/* NOLINTBEGIN(bugprone-reserved-identifier) */
#define HIDDEN __attribute__((visibility("hidden")))
#define NANOSECONDS 1000000000LL

/* 2.32; 0: there may be several threads, so counters are atomic. */
HIDDEN char __libc_single_threaded = 0;

/* 2.30; the clock of the old call is the real-time clock, so the time that is left is added to it. Callers ask their
 * own clock again after a timeout. */
HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                  const struct timespec* until) {
  struct timespec now;
  struct timespec real;
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &real) != 0) abort();
  long long left = (until->tv_sec - now.tv_sec) * NANOSECONDS + (until->tv_nsec - now.tv_nsec);
  if (left < 0) left = 0;
  left += real.tv_nsec;
  real.tv_sec += left / NANOSECONDS;
  real.tv_nsec = left % NANOSECONDS;
  return pthread_cond_timedwait(condition, mutex, &real);
}

/* 2.36; of std::random_device, which nothing here uses. */
HIDDEN uint32_t arc4random(void) {
  uint32_t value = 0;
  if (getrandom(&value, sizeof(value), 0) != (ssize_t)sizeof(value)) abort();
  return value;
}

/* In the static part of the C library, which is not linked. */
extern int __cxa_atexit(void (*function)(void*), void* argument, void* library);
extern void* __dso_handle HIDDEN;
HIDDEN int atexit(void (*function)(void)) {
  return __cxa_atexit((void (*)(void*))function, NULL, (void*)&__dso_handle);
}
/* NOLINTEND(bugprone-reserved-identifier) */
