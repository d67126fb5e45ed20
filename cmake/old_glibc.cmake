# Links what GCC compiled for the C library 2.28 instead of the system's newer one, so that a wheel is manylinux_2_28 and
# keeps GCC's kernels, and nvcc's, which takes no other C++ library: BNEXPORT_GLIBC names a folder with the shared
# libraries of 2.28 to link with (tools/wheels.sh takes zig's). Whatever is missing in them ends the link.
set(BNEXPORT_GLIBC "" CACHE PATH "Folder with the C library to link for; empty for the system's")
if(BNEXPORT_GLIBC)
  enable_language(C)
  add_library(bnexport_old_glibc OBJECT custom_ops/portable/old_glibc.c)
  target_compile_options(bnexport_old_glibc PRIVATE -O2 -Wall -Wextra)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.a OUTPUT_VARIABLE bnexport_libstdcxx
    OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()

function(bnexport_link_for_old_glibc name)
  if(BNEXPORT_GLIBC)
    set_target_properties(${name} PROPERTIES SKIP_BUILD_RPATH ON)  # that folder is for the linker alone
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:bnexport_old_glibc>)
    target_link_options(${name} PRIVATE -nodefaultlibs -Wl,--no-as-needed)
    target_link_libraries(${name} PRIVATE ${bnexport_libstdcxx})
    foreach(part m pthread dl rt c)
      file(GLOB found ${BNEXPORT_GLIBC}/lib${part}.so.*)
      target_link_libraries(${name} PRIVATE ${found})
    endforeach()
    target_link_libraries(${name} PRIVATE ${BNEXPORT_GLIBC}/libld.so.2 gcc gcc_s)
  endif()
endfunction()
