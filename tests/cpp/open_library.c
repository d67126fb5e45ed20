/* Opens a built libbnexport_ops and libbnexport_training by path and runs one batch norm: open_library OPS TRAINING.
 * For libraries of another machine, in an emulator (make wheel, tests/test_packaging.py). */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>

#include "../../custom_ops/include/bnexport.h"

enum { N = 3, C = 5, S = 7 };

static void* symbol(const char* path, const char* name) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* found = library == NULL ? NULL : dlsym(library, name);
  if (found == NULL) fprintf(stderr, "%s\n", dlerror());
  return found;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const char* (*version)(void) = (const char* (*)(void))symbol(argv[1], "bnexport_version");
  const char* (*training_version)(void) = (const char* (*)(void))symbol(argv[2], "bnexport_training_version");
  int (*forward)(const bnexport_forward*, char*, size_t) =
      (int (*)(const bnexport_forward*, char*, size_t))symbol(argv[1], "bnexport_cpu_forward");
  if (version == NULL || training_version == NULL || forward == NULL) return 1;

  float x[N * C * S];
  float y[N * C * S];
  double mean[C];
  double invstd[C];
  char error[256] = "";
  for (int i = 0; i < N * C * S; ++i) x[i] = (float)sin(i);
  bnexport_forward call = {0};
  call.struct_size = sizeof(call);
  call.N = N, call.C = C, call.S = S;
  call.x = x, call.y = y, call.saved_mean = mean, call.saved_invstd = invstd;
  call.momentum = 0.1, call.eps = 1e-5, call.training = 1, call.group_size = 1, call.threads = 2;
  if (forward(&call, error, sizeof(error)) != 0) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  double worst = 0;
  for (int c = 0; c < C; ++c) {
    double sum = 0;
    double squares = 0;
    for (int n = 0; n < N; ++n)
      for (int s = 0; s < S; ++s) sum += x[(n * C + c) * S + s];
    for (int n = 0; n < N; ++n)
      for (int s = 0; s < S; ++s) squares += pow(x[(n * C + c) * S + s] - sum / (N * S), 2);
    for (int n = 0; n < N; ++n)
      for (int s = 0; s < S; ++s) {
        const int i = (n * C + c) * S + s;
        worst = fmax(worst, fabs(y[i] - (x[i] - sum / (N * S)) / sqrt(squares / (N * S) + 1e-5)));
      }
  }
  printf("%s %s, largest error %.1e\n", version(), training_version(), worst);
  return worst < 1e-6 ? 0 : 1;
}
