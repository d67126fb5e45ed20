#!/bin/sh
# Adapters and C API over random nodes under AddressSanitizer + UndefinedBehaviorSanitizer.
# Usage: tests/cpp/fuzz.sh [seconds [seed]]
set -eu
root=$(CDPATH= cd -- "$(dirname -- "$0")/../.." && pwd)
folder=$root/build/sanitize/address_undefined
cmake -S "$root" -B "$folder" -G Ninja -DBNEXPORT_TESTS=ON -DBNEXPORT_CUDA=OFF -DBNEXPORT_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$folder" --target fuzz_adapters >/dev/null
mkdir -p "$root/build/fuzz"
cd "$root/build/fuzz"
UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=allocator_may_return_null=1 BNEXPORT_CUDA_LIBRARY= \
  "$folder/tests/cpp/fuzz_adapters" "${1:-60}" "${2:-$(date +%s)}"
