# This file is for wheels that others install (`make wheel`): the module is linked so that it runs on manylinux_2_28,
# and licences of what it contains are packed, with the list of that in CycloneDX's form (PEP 770).
option(FLASHTILE_RELEASE "Link for manylinux_2_28; pack licences and a bill of materials" OFF)
set(FLASHTILE_RUNTIMES GLIBC_2.28 GLIBCXX_3.4.24 CXXABI_1.3.11 GCC_7.0.0)  # what manylinux_2_28 promises

file(REMOVE_RECURSE ${CMAKE_BINARY_DIR}/licenses)  # of another configuration

# Notes that the module contains code of `name`; further arguments are its licence's file, where a copy has to be given.
function(flashtile_contains name version licence purl)
  set_property(
    GLOBAL APPEND PROPERTY flashtile_components
    "    {\"type\": \"library\", \"name\": \"${name}\", \"version\": \"${version}\",
     \"licenses\": [{\"expression\": \"${licence}\"}], \"purl\": \"${purl}\"}"
  )
  if(ARGN AND FLASHTILE_RELEASE)
    string(REPLACE " " "-" file "${name}.txt")
    configure_file(${ARGN} ${CMAKE_BINARY_DIR}/licenses/${file} COPYONLY)
  endif()
endfunction()

# Links the Python module `target` with runtimes as old as FLASHTILE_RUNTIMES, and installs the list of what it contains.
function(flashtile_release target)
  set(dir ${CMAKE_BINARY_DIR}/runtimes)
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/release/older_runtimes.py ${CMAKE_CXX_COMPILER} ${dir}
            ${FLASHTILE_RUNTIMES} COMMAND_ERROR_IS_FATAL ANY
  )
  target_sources(${target} PRIVATE cmake/release/single_threaded.cpp)
  # As an option, because CMake would have the module look in a link directory when it is loaded.
  target_link_options(${target} PRIVATE -L${dir} LINKER:--no-as-needed)

  flashtile_contains(
    "GCC runtime" ${CMAKE_CXX_COMPILER_VERSION} "GPL-3.0-or-later WITH GCC-exception-3.1"
    pkg:generic/gcc@${CMAKE_CXX_COMPILER_VERSION}
  )
  get_property(components GLOBAL PROPERTY flashtile_components)
  list(JOIN components ",\n" FLASHTILE_COMPONENTS)
  configure_file(cmake/release/flashtile.cdx.json.in flashtile.cdx.json @ONLY)
  if(SKBUILD)
    install(FILES ${CMAKE_BINARY_DIR}/flashtile.cdx.json DESTINATION ${SKBUILD_METADATA_DIR}/sboms COMPONENT python)
    install(DIRECTORY ${CMAKE_BINARY_DIR}/licenses DESTINATION ${SKBUILD_METADATA_DIR} COMPONENT python)
  endif()
endfunction()
