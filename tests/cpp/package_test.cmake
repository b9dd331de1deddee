# This file tests the installed C++ library: it installs that of the build tree `build`, moves it, and builds and runs
# examples/cpp with it, by the compiler and the generator of that tree. cmake -D build=FOLDER -D scratch=FOLDER -P
# package_test.cmake
set(example ${CMAKE_CURRENT_LIST_DIR}/../../examples/cpp)
file(REMOVE_RECURSE ${scratch})
load_cache(${build} READ_WITH_PREFIX of_ CMAKE_CXX_COMPILER CMAKE_CXX_FLAGS CMAKE_GENERATOR CMAKE_MAKE_PROGRAM)
set(ENV{CXX} ${of_CMAKE_CXX_COMPILER})
set(ENV{CXXFLAGS} "${of_CMAKE_CXX_FLAGS}")
set(tools "-G;${of_CMAKE_GENERATOR};-D;CMAKE_MAKE_PROGRAM=${of_CMAKE_MAKE_PROGRAM}")
foreach(command
        "--install;${build};--prefix;${scratch}/first;--component;cpp"
        "-E;rename;${scratch}/first;${scratch}/moved"
        "${tools};-S;${example};-B;${scratch}/build;-D;CMAKE_PREFIX_PATH=${scratch}/moved"
        "--build;${scratch}/build"
)
  execute_process(COMMAND ${CMAKE_COMMAND} ${command} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
execute_process(COMMAND ${scratch}/build/attention COMMAND_ERROR_IS_FATAL ANY)
