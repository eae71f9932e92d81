# One rule about the headers in INCLUDE, chosen by RULE; fails with the names of those that break it.
cmake_minimum_required(VERSION 3.25)
string(REPLACE "," ";" TORCH_FREE "${TORCH_FREE}")
string(REPLACE "," ";" TORCH_INCLUDES "${TORCH_INCLUDES}")
list(TRANSFORM TORCH_INCLUDES PREPEND "-isystem;" OUTPUT_VARIABLE system_flags)
set(flags -std=c++20 "-I${INCLUDE}" ${system_flags})
file(GLOB_RECURSE headers RELATIVE "${INCLUDE}" "${INCLUDE}/*.hpp")
if(NOT headers)
  message(FATAL_ERROR "no headers under ${INCLUDE}")
endif()
set(broken)

# What the compiler reads for `source`, run with one more option; `output` is a text or a file.
function(preprocess source option output)
  execute_process(COMMAND "${CXX}" ${flags} ${option} "${source}" OUTPUT_VARIABLE text ERROR_VARIABLE errors
                  RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${source} does not preprocess:\n${errors}")
  endif()
  set(${output} "${text}" PARENT_SCOPE)
endfunction()

if(RULE STREQUAL "narrow")   # torch/torch.h costs every user 20-40 s
  foreach(header IN LISTS headers)
    file(STRINGS "${INCLUDE}/${header}" found REGEX "^ *#.*torch/(torch|all|extension)[.]h")
    if(found)
      list(APPEND broken "${header}: ${found}")
    endif()
  endforeach()

elseif(RULE STREQUAL "short")   # above 250 lines there are two ideas in it
  foreach(header IN LISTS headers)
    file(READ "${INCLUDE}/${header}" text)
    string(REGEX REPLACE "[^\n]" "" newlines "${text}")
    string(LENGTH "${newlines}" lines)
    if(lines GREATER 250)
      list(APPEND broken "${header}: ${lines} lines, 250 at most")
    endif()
  endforeach()

elseif(RULE STREQUAL "torch_free")   # reads nothing of LibTorch but c10 and what c10 needs
  foreach(name IN LISTS TORCH_FREE)
    if(EXISTS "${INCLUDE}/frugal/${name}.hpp")
      preprocess("${INCLUDE}/frugal/${name}.hpp" "-M" read)
      string(REGEX MATCHALL "[^ \n]*/include/(ATen|torch|caffe2)/[^ \n]*" heavy "${read}")
      list(FILTER heavy EXCLUDE REGEX "/torch/headeronly/")
      if(heavy)
        list(GET heavy 0 first)
        list(APPEND broken "${name}.hpp reads ${first}")
      endif()
    endif()
  endforeach()

elseif(RULE STREQUAL "weight")   # at most a fifth more to read than LibTorch alone
  file(WRITE "${WORK}/weight_without.cpp" "#include <torch/torch.h>\n")
  file(WRITE "${WORK}/weight_with.cpp" "#include <torch/torch.h>\n#include <frugal/frugal.hpp>\n")
  foreach(which IN ITEMS without with)
    preprocess("${WORK}/weight_${which}.cpp" "-E;-P;-o;${WORK}/weight_${which}.txt" ignored)
    file(SIZE "${WORK}/weight_${which}.txt" ${which})
  endforeach()
  math(EXPR permille "(${with} - ${without}) * 1000 / ${without}")
  message("preprocessed: ${without} bytes without frugal, ${with} with it: ${permille} per mille more")
  if(permille GREATER 200)
    list(APPEND broken "frugal/frugal.hpp: ${permille} per mille more than torch/torch.h alone, 200 at most")
  endif()

else()
  message(FATAL_ERROR "no such rule: '${RULE}'")
endif()

if(broken)
  list(JOIN broken "\n  " text)
  message(FATAL_ERROR "rule '${RULE}' is broken:\n  ${text}")
endif()
