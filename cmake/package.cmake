# This file installs the C++ library, so that find_package(flashtile) gives other CMake projects flashtile::flashtile:
#
#   cmake --install build --prefix /where/to --component cpp
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# Appends to `list` the header `name` of include/flashtile and all that it includes from there.
function(flashtile_with_included list name)
  if(name IN_LIST ${list})
    return()
  endif()
  set(found ${${list}} ${name})
  file(STRINGS ${PROJECT_SOURCE_DIR}/include/flashtile/${name} lines REGEX "^#include \"flashtile/")
  foreach(line IN LISTS lines)
    string(REGEX MATCH "flashtile/([^\"]*)" line ${line})
    flashtile_with_included(found ${CMAKE_MATCH_1})
  endforeach()
  set(${list} ${found} PARENT_SCOPE)
endfunction()

set(headers "")
foreach(name flashtile.h merge.h quantize.h)
  flashtile_with_included(headers ${name})
endforeach()
foreach(name IN LISTS headers)
  get_filename_component(folder flashtile/${name} DIRECTORY)
  install(FILES include/flashtile/${name} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${folder} COMPONENT cpp)
endforeach()

set_target_properties(flashtile_core PROPERTIES EXPORT_NAME flashtile)
set_target_properties(flashtile_cpu PROPERTIES EXPORT_NAME cpu)
set(libraries flashtile_core flashtile_cpu)
if(FLASHTILE_WITH_CUDA)
  set_target_properties(flashtile_cuda PROPERTIES EXPORT_NAME cuda)
  list(APPEND libraries flashtile_cuda)
  # The static CUDA runtime comes along, so that who links the library needs no CUDA toolkit.
  find_library(
    FLASHTILE_CUDA_RUNTIME cudart_static
    PATHS ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES} ${cuda_dir}/nvidia/cu13/lib
    NO_DEFAULT_PATH REQUIRED
  )
  install(FILES ${FLASHTILE_CUDA_RUNTIME} DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
endif()
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/flashtile)
install(
  TARGETS ${libraries} EXPORT flashtile
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
)
install(EXPORT flashtile NAMESPACE flashtile:: FILE flashtileTargets.cmake DESTINATION ${package} COMPONENT cpp)

configure_package_config_file(
  cmake/flashtileConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/flashtileConfig.cmake INSTALL_DESTINATION ${package}
  PATH_VARS CMAKE_INSTALL_LIBDIR
)
write_basic_package_version_file(flashtileConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/flashtileConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/flashtileConfigVersion.cmake
  DESTINATION ${package} COMPONENT cpp
)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT cpp)
