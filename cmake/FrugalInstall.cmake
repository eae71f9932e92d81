# Install rules: the headers, the targets, and FindLibTorch.cmake, so that an installed frugal finds LibTorch the same way.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(frugal_config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/frugal")
set_target_properties(frugal PROPERTIES EXPORT_NAME frugal)
install(TARGETS frugal EXPORT frugalTargets INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.hpp")
install(EXPORT frugalTargets NAMESPACE frugal:: DESTINATION "${frugal_config_dir}")

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/frugalConfig.cmake.in"
                              "${PROJECT_BINARY_DIR}/frugalConfig.cmake" INSTALL_DESTINATION "${frugal_config_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/frugalConfigVersion.cmake" COMPATIBILITY SameMinorVersion
                                 ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/frugalConfig.cmake" "${PROJECT_BINARY_DIR}/frugalConfigVersion.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake" DESTINATION "${frugal_config_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/doc/frugal")
