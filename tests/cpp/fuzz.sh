#!/bin/sh
# Random nodes in ONNX Runtime and random calls of the C API, the libraries under AddressSanitizer + UndefinedBehaviorSanitizer.
# Usage: tests/cpp/fuzz.sh [cases [seed]]
set -eu
root=$(CDPATH= cd -- "$(dirname -- "$0")/../.." && pwd)
folder=$root/build/sanitize/address_undefined
cmake -S "$root" -B "$folder" -G Ninja -DBNEXPORT_TESTS=ON -DBNEXPORT_CUDA=OFF -DBNEXPORT_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$folder" --target bnexport_ops bnexport_training >/dev/null
cd "$root"
export BNEXPORT_LIBRARY="$folder/libbnexport_ops.so" BNEXPORT_FUZZ_CASES="${1:-2000}" BNEXPORT_FUZZ_SEED="${2:-$(date +%s)}"
# The interpreter is not built with them, so they come first, and leaks are its own. A finding ends the process: -s shows it.
export UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONMALLOC=malloc
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
  python -m pytest -n 0 -s tests/custom_ops/test_fuzz.py
