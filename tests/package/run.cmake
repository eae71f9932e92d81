# Builds and runs the consumer in this folder, with frugal found in the given WAY.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE "${WORK}")
set(ENV{CMAKE_PREFIX_PATH} "")   # what the machine has must not help

function(must_run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(failed)
    list(JOIN ARGN " " command)
    message("${command}\n${output}")
    message(FATAL_ERROR "a step of the consumer's build failed (above)")
  endif()
endfunction()

set(how "-DFRUGAL_SOURCE=${FRUGAL_SOURCE}")
if(WAY STREQUAL "find_package")
  must_run("${CMAKE_COMMAND}" --install "${FRUGAL_BUILD}" --prefix "${WORK}/prefix")
  file(GLOB_RECURSE installed RELATIVE "${WORK}/prefix" "${WORK}/prefix/*")
  if(NOT "include/frugal/frugal.hpp" IN_LIST installed)
    message(FATAL_ERROR "the installation lacks include/frugal/frugal.hpp: ${installed}")
  endif()
  set(how "-Dfrugal_ROOT=${WORK}/prefix")
endif()
must_run("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${WORK}/build" -G "${GENERATOR}" ${how} "-DWAY=${WAY}"
         "-DCMAKE_CXX_COMPILER=${CXX}" "-DTORCH_ROOT=${TORCH_ROOT}" "-DEXPECTED_VERSION=${VERSION}")
must_run("${CMAKE_COMMAND}" --build "${WORK}/build" -j 2)
must_run("${WORK}/build/consumer")
