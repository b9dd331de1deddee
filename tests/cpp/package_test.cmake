# This file tests the installed C++ library: it installs that of the build tree `build`, moves it, and builds and runs
# examples/cpp with it. cmake -D build=FOLDER -D scratch=FOLDER -D compiler=C++ -D flags=FLAGS -P
# package_test.cmake
set(example ${CMAKE_CURRENT_LIST_DIR}/../../examples/cpp)
file(REMOVE_RECURSE ${scratch})
set(ENV{CXX} ${compiler})
set(ENV{CXXFLAGS} "${flags}")
foreach(command
        "--install;${build};--prefix;${scratch}/first;--component;cpp"
        "-E;rename;${scratch}/first;${scratch}/moved"
        "-S;${example};-B;${scratch}/build;-D;CMAKE_PREFIX_PATH=${scratch}/moved"
        "--build;${scratch}/build"
)
  execute_process(COMMAND ${CMAKE_COMMAND} ${command} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
execute_process(COMMAND ${scratch}/build/attention COMMAND_ERROR_IS_FATAL ANY)
