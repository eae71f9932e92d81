# Finds LibTorch 2.11 or newer, CPU or CUDA build, without asking for a CUDA toolkit.
#
# Looked at, in this order; the first usable one wins:
#   1. FRUGAL_TORCH_ROOT, TORCH_ROOT   CMake variable, then environment. Nothing usable there is an error.
#   2. CMAKE_PREFIX_PATH               CMake variable, then environment
#   3. the active Python               the torch package that `python3` would import
#   4. .venv                           beside this project or its sources; `bash cmake/dev.sh setup` makes one
#   5. TorchConfig.cmake               wherever find_package(Torch) finds it
# A root is a folder with include/ and lib/: an unpacked libtorch, a torch package inside site-packages, or a Python
# environment that holds one.
#
# Defines
#   LibTorch::LibTorch   headers (as SYSTEM) and libraries; the GPU libraries stay linked although no symbol of theirs
#                        is used: without them a CUDA device silently does not exist
#   LibTorch::c10        headers of c10 and ATen, and libc10 alone: for code that needs no tensor
#   LibTorch_ROOT_DIR, LibTorch_VERSION, LibTorch_CUDA_VERSION (empty: a CPU build)
#
# `cmake -P FindLibTorch.cmake` only says what would be found from the current folder: a line `root|version|cuda`.

if(NOT DEFINED LibTorch_FIND_VERSION)
  set(LibTorch_FIND_VERSION 2.11)
endif()

# Root, include and library folders of the LibTorch at `place`, or an empty root.
function(_libtorch_probe place root include lib)
  set(${root} "" PARENT_SCOPE)
  if(NOT IS_ABSOLUTE "${place}")
    get_filename_component(place "${place}" ABSOLUTE BASE_DIR "${CMAKE_SOURCE_DIR}")
  endif()
  file(GLOB environments LIST_DIRECTORIES true "${place}/lib/python3*/site-packages/torch")
  foreach(candidate IN ITEMS "${place}" "${place}/../.." "${place}/torch" LISTS environments)
    if(NOT EXISTS "${candidate}/include/torch/csrc/api/include/torch/torch.h")
      continue()
    endif()
    foreach(folder IN ITEMS lib lib64 "lib/${CMAKE_LIBRARY_ARCHITECTURE}")
      if(EXISTS "${candidate}/${folder}/libtorch_cpu.so")
        get_filename_component(candidate "${candidate}" REALPATH)
        set(${root} "${candidate}" PARENT_SCOPE)
        set(${include} "${candidate}/include" PARENT_SCOPE)
        set(${lib} "${candidate}/${folder}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()
endfunction()

# The version that the headers under `include` state.
function(_libtorch_version include version)
  set(${version} "" PARENT_SCOPE)
  foreach(header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS "${include}/${header}")
      file(STRINGS "${include}/${header}" lines REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      list(TRANSFORM lines REPLACE ".* " "")
      list(LENGTH lines count)
      if(count EQUAL 3)
        list(JOIN lines "." text)
        set(${version} "${text}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
endfunction()

# Why the LibTorch at `root` cannot be used, or an empty string.
function(_libtorch_problem root version problem)
  set(${problem} "" PARENT_SCOPE)
  if(NOT version)
    set(${problem} "its version cannot be read" PARENT_SCOPE)
  elseif(version VERSION_LESS LibTorch_FIND_VERSION)
    set(${problem} "it is ${version}, and ${LibTorch_FIND_VERSION} or newer is needed" PARENT_SCOPE)
  elseif(EXISTS "${root}/share/cmake/Torch/TorchConfig.cmake")
    file(STRINGS "${root}/share/cmake/Torch/TorchConfig.cmake" old_abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
    if(old_abi)
      set(${problem} "it was built with the pre-C++11 ABI, which does not link with today's libstdc++" PARENT_SCOPE)
    endif()
  endif()
endfunction()

# The places to look at, as `label|folder`, in order.
function(_libtorch_places places explicit)
  set(found)
  set(${explicit} FALSE PARENT_SCOPE)
  foreach(name IN ITEMS FRUGAL_TORCH_ROOT TORCH_ROOT)
    foreach(value IN ITEMS "${${name}}" "$ENV{${name}}")
      if(value)
        set(${explicit} TRUE PARENT_SCOPE)
        set(${places} "${name}|${value}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()

  string(REPLACE ":" ";" from_environment "$ENV{CMAKE_PREFIX_PATH}")
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH from_environment)
    list(APPEND found "CMAKE_PREFIX_PATH|${prefix}")
  endforeach()
  if(_libtorch_remembered)
    list(APPEND found "the last configure|${_libtorch_remembered}")
  endif()
  foreach(python IN ITEMS python3 python)
    execute_process(
      COMMAND ${python} -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed AND folder)
      list(APPEND found "the active Python|${folder}")
      break()
    endif()
  endforeach()
  foreach(base IN ITEMS "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/.." "${CMAKE_SOURCE_DIR}")
    list(APPEND found ".venv|${base}/.venv")
  endforeach()
  set(${places} "${found}" PARENT_SCOPE)
endfunction()

# Imported targets over the libraries in `lib`.
function(_libtorch_targets include lib)
  set(LibTorch_LIBRARIES)
  foreach(name IN ITEMS c10 torch_cpu torch c10_cuda torch_cuda)
    if(EXISTS "${lib}/lib${name}.so")
      if(NOT TARGET LibTorch::lib${name})
        add_library(LibTorch::lib${name} SHARED IMPORTED)
        set_target_properties(LibTorch::lib${name} PROPERTIES IMPORTED_LOCATION "${lib}/lib${name}.so")
      endif()
      list(APPEND LibTorch_LIBRARIES ${name})
    endif()
  endforeach()

  add_library(LibTorch::c10 INTERFACE IMPORTED)
  target_include_directories(LibTorch::c10 SYSTEM INTERFACE "${include}")
  target_link_libraries(LibTorch::c10 INTERFACE LibTorch::libc10 Threads::Threads)

  # The flags force every library into the program, used or not. The targets behind them repeat the libraries for the
  # sake of the run path, which CMake derives from targets only.
  list(TRANSFORM LibTorch_LIBRARIES REPLACE "(.+)" "\"${lib}/lib\\1.so\"" OUTPUT_VARIABLE forced)
  list(JOIN forced "," forced)
  list(TRANSFORM LibTorch_LIBRARIES PREPEND "LibTorch::lib" OUTPUT_VARIABLE libraries)
  add_library(LibTorch::LibTorch INTERFACE IMPORTED)
  target_include_directories(LibTorch::LibTorch SYSTEM INTERFACE "${include}" "${include}/torch/csrc/api/include")
  target_link_libraries(LibTorch::LibTorch INTERFACE "-Wl,--push-state,--no-as-needed,${forced},--pop-state"
                                                     ${libraries} Threads::Threads)
endfunction()

# Last resort: what the package config of LibTorch itself says.
macro(_libtorch_from_torch_config)
  find_package(Torch CONFIG QUIET)
  if(Torch_FOUND)
    list(GET TORCH_INCLUDE_DIRS 0 LibTorch_INCLUDE_DIR)
    _libtorch_version("${LibTorch_INCLUDE_DIR}" LibTorch_VERSION)
    get_filename_component(LibTorch_ROOT_DIR "${LibTorch_INCLUDE_DIR}" DIRECTORY)
    _libtorch_problem("${LibTorch_ROOT_DIR}" "${LibTorch_VERSION}" _libtorch_why)
    if(_libtorch_why)
      list(APPEND _libtorch_rejected "  ${Torch_DIR} (find_package(Torch)): ${_libtorch_why}")
      set(LibTorch_ROOT_DIR)
    else()
      add_library(LibTorch::LibTorch INTERFACE IMPORTED)
      target_include_directories(LibTorch::LibTorch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
      target_link_libraries(LibTorch::LibTorch INTERFACE ${TORCH_LIBRARIES} Threads::Threads)
      add_library(LibTorch::c10 INTERFACE IMPORTED)
      target_include_directories(LibTorch::c10 SYSTEM INTERFACE "${LibTorch_INCLUDE_DIR}")
      target_link_libraries(LibTorch::c10 INTERFACE c10 Threads::Threads)
    endif()
  endif()
endmacro()

if(NOT CMAKE_SCRIPT_MODE_FILE)
  if(TARGET LibTorch::LibTorch)
    set(LibTorch_FOUND TRUE)
    return()
  endif()
  find_package(Threads REQUIRED)
endif()

set(_libtorch_rejected)
set(LibTorch_ROOT_DIR)
_libtorch_places(_libtorch_candidates _libtorch_explicit)
foreach(_libtorch_entry IN LISTS _libtorch_candidates)
  string(REGEX MATCH "^([^|]*)[|](.*)$" _ "${_libtorch_entry}")
  set(_libtorch_label "${CMAKE_MATCH_1}")
  set(_libtorch_place "${CMAKE_MATCH_2}")
  _libtorch_probe("${_libtorch_place}" LibTorch_ROOT_DIR LibTorch_INCLUDE_DIR LibTorch_LIBRARY_DIR)
  if(NOT LibTorch_ROOT_DIR)
    if(NOT _libtorch_label MATCHES "CMAKE_PREFIX_PATH|.venv")
      list(APPEND _libtorch_rejected "  ${_libtorch_place} (${_libtorch_label}): no LibTorch is there")
    endif()
    continue()
  endif()
  _libtorch_version("${LibTorch_INCLUDE_DIR}" LibTorch_VERSION)
  _libtorch_problem("${LibTorch_ROOT_DIR}" "${LibTorch_VERSION}" _libtorch_why)
  if(NOT _libtorch_why)
    break()
  endif()
  list(APPEND _libtorch_rejected "  ${LibTorch_ROOT_DIR} (${_libtorch_label}): ${_libtorch_why}")
  set(LibTorch_ROOT_DIR)
endforeach()

if(CMAKE_SCRIPT_MODE_FILE)
  set(LibTorch_FIND_REQUIRED TRUE)
elseif(LibTorch_ROOT_DIR)
  _libtorch_targets("${LibTorch_INCLUDE_DIR}" "${LibTorch_LIBRARY_DIR}")
elseif(NOT _libtorch_explicit)
  _libtorch_from_torch_config()
endif()

set(LibTorch_CUDA_VERSION "")
if(LibTorch_ROOT_DIR AND EXISTS "${LibTorch_LIBRARY_DIR}/libtorch_cuda.so")
  set(LibTorch_CUDA_VERSION "unknown")
  if(EXISTS "${LibTorch_ROOT_DIR}/version.py")
    file(STRINGS "${LibTorch_ROOT_DIR}/version.py" _libtorch_line REGEX "^cuda.*= *'")
    string(REGEX REPLACE ".*'([0-9.]+)'.*" "\\1" LibTorch_CUDA_VERSION "${_libtorch_line}")
  endif()
endif()

# An environment may differ at the next configure (a build tool runs it too): what was found stays, as find_library's
# results do. A root or a prefix path that is given still comes first.
if(LibTorch_ROOT_DIR AND NOT CMAKE_SCRIPT_MODE_FILE)
  set(_libtorch_remembered "${LibTorch_ROOT_DIR}" CACHE INTERNAL "LibTorch found by the last configure")
endif()

set(_libtorch_tried)
if(_libtorch_rejected)
  list(JOIN _libtorch_rejected "\n" _libtorch_tried)
  set(_libtorch_tried "Looked at, and not usable:\n${_libtorch_tried}\n")
endif()
set(CMAKE_FIND_PACKAGE_NAME LibTorch)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch
  REQUIRED_VARS LibTorch_ROOT_DIR
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE
    "no usable LibTorch (${LibTorch_FIND_VERSION} or newer) was found.\n${_libtorch_tried}Any one of these provides it:\n  -DFRUGAL_TORCH_ROOT=/path/to/libtorch   an unpacked libtorch, or .../site-packages/torch (or TORCH_ROOT, here or in the environment)\n  -DCMAKE_PREFIX_PATH=/path/to/libtorch   the same, the usual way of CMake\n  python3 -m pip install torch            in the Python environment that is active when CMake runs\n  bash cmake/dev.sh setup                 makes .venv with LibTorch in it, in a checkout of frugal\n")

if(CMAKE_SCRIPT_MODE_FILE)
  message("${LibTorch_ROOT_DIR}|${LibTorch_VERSION}|${LibTorch_CUDA_VERSION}")
endif()
