# A project outside of this one uses frugal in both documented ways. Each test configures, builds and runs it anew.
foreach(way IN ITEMS find_package add_subdirectory)
  add_test(NAME "package/${way}"
           COMMAND "${CMAKE_COMMAND}" -D WAY=${way} -D "FRUGAL_SOURCE=${PROJECT_SOURCE_DIR}" -D "FRUGAL_BUILD=${PROJECT_BINARY_DIR}"
                   -D "WORK=${CMAKE_CURRENT_BINARY_DIR}/package/${way}" -D "GENERATOR=${CMAKE_GENERATOR}"
                   -D "CXX=${CMAKE_CXX_COMPILER}" -D "TORCH_ROOT=${LibTorch_ROOT_DIR}"
                   -D "VERSION=${PROJECT_VERSION}" -P "${CMAKE_CURRENT_SOURCE_DIR}/package/run.cmake")
  set_tests_properties("package/${way}" PROPERTIES LABELS package TIMEOUT 600)
endforeach()
