# Rules that every header keeps: it compiles alone, it stays light, it stays short.
set(alone)
foreach(header IN LISTS public_headers)
  get_filename_component(name "${header}" NAME_WE)
  set(source "${CMAKE_CURRENT_BINARY_DIR}/headers/${name}.cpp")
  file(CONFIGURE OUTPUT "${source}" CONTENT "#include <${header}>\n#include <${header}>\n" @ONLY)
  list(APPEND alone "${source}")
endforeach()
add_library(frugal_headers OBJECT ${alone})
target_link_libraries(frugal_headers PRIVATE frugal::frugal frugal_private)

get_target_property(torch_includes LibTorch::LibTorch INTERFACE_INCLUDE_DIRECTORIES)
list(JOIN torch_free_headers "," torch_free_text)
list(JOIN torch_includes "," torch_includes_text)
foreach(rule IN ITEMS narrow short torch_free weight)
  add_test(NAME "headers/${rule}"
           COMMAND "${CMAKE_COMMAND}" -D RULE=${rule} -D "INCLUDE=${PROJECT_SOURCE_DIR}/include" -D "CXX=${CMAKE_CXX_COMPILER}"
                   -D "TORCH_FREE=${torch_free_text}" -D "TORCH_INCLUDES=${torch_includes_text}"
                   -D "WORK=${CMAKE_CURRENT_BINARY_DIR}/headers" -P "${CMAKE_CURRENT_SOURCE_DIR}/support/header_rules.cmake")
  set_tests_properties("headers/${rule}" PROPERTIES LABELS headers)
endforeach()
