#!/bin/sh
# The C++ unit tests under AddressSanitizer + UndefinedBehaviorSanitizer, then ThreadSanitizer.
# Usage: tests/cpp/sanitize.sh [build folder]
set -eu
root=$(CDPATH= cd -- "$(dirname -- "$0")/../.." && pwd)
build=${1:-$root/build/sanitize}
for kind in address,undefined thread; do
  folder=$build/$(echo "$kind" | tr , _)
  cmake -S "$root" -B "$folder" -G Ninja -DBNEXPORT_TESTS=ON -DBNEXPORT_CUDA=OFF -DBNEXPORT_SANITIZE="$kind" -DCMAKE_BUILD_TYPE=Release >/dev/null
  cmake --build "$folder" --target cpp_tests
  echo "== $kind"
  # No detect_stack_use_after_return: its frames are not aligned for 64-byte vectors.
  UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=allocator_may_return_null=1 \
    ctest --test-dir "$folder" --output-on-failure
done
