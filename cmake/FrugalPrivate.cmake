# What our own programs are built with and no user ever sees: warnings, sanitizers, compiler cache, linker, PCH.
# Programs link frugal_private, or call frugal_with_torch(), which adds the precompiled LibTorch headers.

if(PROJECT_IS_TOP_LEVEL AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(FRUGAL_CCACHE ccache)
  if(FRUGAL_CCACHE)
    # Without these a precompiled header defeats the cache, and so does a checkout in another folder.
    set(CMAKE_CXX_COMPILER_LAUNCHER
        "${CMAKE_COMMAND}" -E env "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime"
        "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${FRUGAL_CCACHE}")
  endif()
endif()

add_library(frugal_private INTERFACE)
target_compile_features(frugal_private INTERFACE cxx_std_20)
set(frugal_cxx "$<COMPILE_LANGUAGE:CXX>")
target_compile_options(frugal_private INTERFACE
                       "$<${frugal_cxx}:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion>")
if(FRUGAL_SANITIZE)
  target_compile_options(frugal_private INTERFACE
                         "$<${frugal_cxx}:-fsanitize=${FRUGAL_SANITIZE};-fno-omit-frame-pointer>")
  target_link_options(frugal_private INTERFACE "-fsanitize=${FRUGAL_SANITIZE}")
endif()
find_program(FRUGAL_MOLD mold)
if(FRUGAL_MOLD)
  target_link_options(frugal_private INTERFACE -fuse-ld=mold)
endif()

# The headers of frugal with c10 alone behind them: for programs that must do without tensors.
add_library(frugal_core INTERFACE)
target_include_directories(frugal_core INTERFACE "${PROJECT_SOURCE_DIR}/include")
target_link_libraries(frugal_core INTERFACE LibTorch::c10 frugal_private)

# LibTorch's headers cost 20-40 s per source: compiled once here, reused by every program below.
function(frugal_with_torch target)
  target_link_libraries(${target} PRIVATE frugal::frugal frugal_private)
  if(NOT FRUGAL_PCH)
    return()
  endif()
  if(NOT TARGET frugal_pch)
    file(WRITE "${PROJECT_BINARY_DIR}/pch/empty.cpp" "")
    add_library(frugal_pch OBJECT "${PROJECT_BINARY_DIR}/pch/empty.cpp")
    target_link_libraries(frugal_pch PRIVATE frugal::frugal frugal_private)
    if(TARGET frugal_catch)
      target_link_libraries(frugal_pch PRIVATE frugal_catch)
      target_precompile_headers(frugal_pch PRIVATE <support/catch.hpp>)   # LibTorch, then Catch2
    else()
      target_precompile_headers(frugal_pch PRIVATE <torch/torch.h>)
    endif()
    # For the compiler cache: the preprocessed text names the PCH instead of spelling it out.
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      target_compile_options(frugal_pch PRIVATE -fpch-preprocess)
    else()
      target_compile_options(frugal_pch PRIVATE "SHELL:-Xclang -fno-pch-timestamp")
    endif()
  endif()
  target_precompile_headers(${target} REUSE_FROM frugal_pch)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE "$<${frugal_cxx}:-fpch-preprocess>")
  endif()
endfunction()

# Catch2 2.13 (Debian 12) and 3.x (elsewhere); tests include support/catch.hpp, never Catch2 itself.
if(FRUGAL_TESTS AND NOT FRUGAL_GPU_ONLY)
  find_package(Catch2 QUIET)
  if(NOT Catch2_FOUND)
    message(FATAL_ERROR "The tests need Catch2 (2.13 or 3.x). Install the package catch2, or configure with -DFRUGAL_TESTS=OFF.")
  endif()
  add_library(frugal_catch INTERFACE)
  target_include_directories(frugal_catch INTERFACE "${PROJECT_SOURCE_DIR}/tests")
  target_link_libraries(frugal_catch INTERFACE Catch2::Catch2)
endif()
