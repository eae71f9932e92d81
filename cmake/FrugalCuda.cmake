# CUDA is optional and serves device tests and benchmarks only: the library itself never needs a toolkit.
#
# Option FRUGAL_CUDA: on by itself where frugal is the top-level project, LibTorch is a CUDA build, and an nvcc of the
# same CUDA major version is found. Defines frugal_cuda: headers and libraries for programs with .cu sources.

find_program(FRUGAL_NVCC nvcc HINTS "$ENV{CUDACXX}" "$ENV{CUDA_HOME}/bin" "${LibTorch_ROOT_DIR}/../nvidia/cu13/bin"
             PATHS /usr/local/cuda/bin /opt/cuda/bin DOC "nvcc, for FRUGAL_CUDA")
set(frugal_nvcc_version "")
if(FRUGAL_NVCC)
  execute_process(COMMAND "${FRUGAL_NVCC}" --version OUTPUT_VARIABLE frugal_nvcc_text ERROR_QUIET)
  if(frugal_nvcc_text MATCHES "release ([0-9]+[.][0-9]+)")
    set(frugal_nvcc_version "${CMAKE_MATCH_1}")
  endif()
endif()

set(frugal_cuda_problem "")
string(REGEX MATCH "^[0-9]+" frugal_torch_cuda_major "${LibTorch_CUDA_VERSION}")
string(REGEX MATCH "^[0-9]+" frugal_nvcc_major "${frugal_nvcc_version}")
if(NOT LibTorch_CUDA_VERSION)
  set(frugal_cuda_problem "the LibTorch at ${LibTorch_ROOT_DIR} is a CPU build")
elseif(NOT frugal_nvcc_version)
  set(frugal_cuda_problem "no nvcc was found (PATH, CUDACXX, CUDA_HOME, /usr/local/cuda)")
elseif(frugal_torch_cuda_major AND NOT frugal_torch_cuda_major EQUAL frugal_nvcc_major)
  set(frugal_cuda_problem
      "LibTorch was built with CUDA ${LibTorch_CUDA_VERSION} and ${FRUGAL_NVCC} is of CUDA ${frugal_nvcc_version}")
endif()

set(frugal_cuda_default OFF)
if(PROJECT_IS_TOP_LEVEL AND NOT frugal_cuda_problem)
  set(frugal_cuda_default ON)
endif()
option(FRUGAL_CUDA "Build device tests and benchmarks that need nvcc and cuBLAS" ${frugal_cuda_default})

if(FRUGAL_CUDA)
  if(frugal_cuda_problem)
    message(FATAL_ERROR "FRUGAL_CUDA=ON, but ${frugal_cuda_problem}. -DFRUGAL_CUDA=OFF builds without device code.")
  endif()
  set(CMAKE_CUDA_COMPILER "${FRUGAL_NVCC}" CACHE FILEPATH "nvcc")
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}" CACHE FILEPATH "nvcc's host compiler")
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 75 80 90)
  endif()
  set(CMAKE_CUDA_EXTENSIONS ON)   # else CMake adds a -std of its own behind the one below
  enable_language(CUDA)

  # A Python environment has the libraries beside LibTorch, and those are what LibTorch loads; a toolkit has its own.
  get_filename_component(frugal_toolkit "${FRUGAL_NVCC}" REALPATH)
  get_filename_component(frugal_toolkit "${frugal_toolkit}/../.." ABSOLUTE)
  set(frugal_wheels "${LibTorch_ROOT_DIR}/../nvidia")
  set(frugal_cuda_hints "${frugal_wheels}/cu${frugal_nvcc_major}" "${frugal_wheels}/cublas"
                        "${frugal_wheels}/cuda_runtime" "${frugal_toolkit}" ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}/..)
  foreach(name IN ITEMS cublas cublasLt cudart)
    find_library(FRUGAL_${name}_LIBRARY NAMES lib${name}.so.${frugal_nvcc_major} lib${name}.so
                 HINTS ${frugal_cuda_hints} PATH_SUFFIXES lib lib64)
  endforeach()
  # The runtime's headers come with the compiler: beside LibTorch they lack crt/, which is the compiler's.
  find_path(FRUGAL_cudart_INCLUDE_DIR crt/host_config.h HINTS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}
            ${frugal_cuda_hints} PATH_SUFFIXES include)
  find_path(FRUGAL_cublas_INCLUDE_DIR cublas_v2.h HINTS ${frugal_cuda_hints} PATH_SUFFIXES include)
  if(NOT FRUGAL_cublas_LIBRARY OR NOT FRUGAL_cudart_LIBRARY OR NOT FRUGAL_cublas_INCLUDE_DIR
     OR NOT FRUGAL_cudart_INCLUDE_DIR)
    message(FATAL_ERROR "FRUGAL_CUDA=ON, but cuBLAS or the CUDA runtime was not found. Install the CUDA toolkit's "
                        "cuBLAS, or the nvidia-cublas package into the Python environment that holds LibTorch.")
  endif()

  add_library(frugal_cuda INTERFACE)
  target_include_directories(frugal_cuda SYSTEM INTERFACE "${FRUGAL_cudart_INCLUDE_DIR}" "${FRUGAL_cublas_INCLUDE_DIR}")
  foreach(name IN ITEMS cublas cublasLt cudart)
    add_library(frugal_${name} SHARED IMPORTED)
    set_target_properties(frugal_${name} PROPERTIES IMPORTED_LOCATION "${FRUGAL_${name}_LIBRARY}")
    target_link_libraries(frugal_cuda INTERFACE frugal_${name})
  endforeach()
  # CMake 3.25 has no C++20 for nvcc, and LibTorch's headers need it.
  target_compile_options(frugal_cuda INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)
  message(STATUS "CUDA: nvcc ${frugal_nvcc_version} at ${FRUGAL_NVCC}, cuBLAS at ${FRUGAL_cublas_LIBRARY}")
endif()
