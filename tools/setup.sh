#!/usr/bin/env bash
# Creates .venv with the pinned packages and the compiled library (make setup): tools/setup.sh PYTHON BUILD_FOLDER
# Says what it does, and how long it has been at it every 20 seconds, because pip is silent for minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 build=$2 venv=.venv

fail() {
  echo "make setup: $*" >&2
  exit 1
}

# step TEXT COMMAND...: runs a command between lines that tell of it.
step() {
  local text=$1 start=$SECONDS code=0 beat
  shift
  echo "setup: $text"
  (while sleep "${BNEXPORT_BEAT:-20}"; do echo "setup: $text ($((SECONDS - start)) s)"; done) &
  beat=$!
  "$@" || code=$?
  kill "$beat"
  wait "$beat" 2> /dev/null || true
  [ "$code" = 0 ] || fail "this failed: $text"
}

echo "setup: checking Python, compiler and pip"
[ ! -x $venv/bin/python ] || python=$venv/bin/python
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2> /dev/null ||
  fail "$python is $("$python" --version 2>&1 || true), expected Python 3.10 to 3.14: remove .venv if it is there and run make PYTHON=python3.12 setup"
[ -n "$(command -v "${CXX:-c++}" g++ clang++ | head -n 1)" ] ||
  fail "no C++ compiler: install one (apt install g++, dnf install gcc-c++) or set CXX"
"$python" -c 'import ensurepip, venv' 2> /dev/null || fail "$python has no venv: install it (apt install python3-venv)"
[ -x $venv/bin/python ] || step "creating $venv" "$python" -m venv $venv
$venv/bin/python -c 'import pip, sys; sys.exit([int(n) for n in pip.__version__.split(".")[:2]] < [22, 3])' ||
  fail "pip is too old: $venv/bin/python -m pip install --upgrade pip"

pip() { $venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "$@"; }
PATH="$PWD/$venv/bin:$PATH"
step "installing PyTorch, CMake and Ninja" pip torch scikit-build-core cmake ninja
step "installing the other packages and compiling the library" pip --no-build-isolation \
  --config-settings=cmake.define.BNEXPORT_CUDA=OFF --config-settings="build-dir=$build" -e '.[demo,dev]'
echo "setup: done after $SECONDS s"
