# One ctest test per file: it must not compile, with one error that says the sentence behind `// expect:` in the file.
# A file named ok_x.cpp must compile: it shows that the others fail for their own reason, not for want of a header.
get_target_property(c10_includes LibTorch::c10 INTERFACE_INCLUDE_DIRECTORIES)
list(JOIN c10_includes "," c10_includes_text)
foreach(source IN LISTS compile_fail_sources)
  get_filename_component(name "${source}" NAME_WE)
  add_test(NAME "compile_fail/${name}"
           COMMAND "${CMAKE_COMMAND}" -D "SOURCE=${CMAKE_CURRENT_SOURCE_DIR}/${source}" -D "CXX=${CMAKE_CXX_COMPILER}"
                   -D "INCLUDE=${PROJECT_SOURCE_DIR}/include" -D "SYSTEM_INCLUDES=${c10_includes_text}"
                   -P "${CMAKE_CURRENT_SOURCE_DIR}/support/must_not_compile.cmake")
  set_tests_properties("compile_fail/${name}" PROPERTIES LABELS compile_fail)
endforeach()
