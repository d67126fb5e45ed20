# Builds with zig's clang for another machine and an old C library: make wheel. BNEXPORT_ZIG_TARGET names machine and C library, such as
# x86_64-linux-gnu.2.28 or aarch64-linux-gnu.2.28; ziglang comes from the package index.
set(CMAKE_SYSTEM_NAME Linux)
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "$ENV{BNEXPORT_ZIG_TARGET}")
set(CMAKE_CXX_COMPILER ${CMAKE_CURRENT_LIST_DIR}/../tools/zig-c++)
