# This file compiles through ccache where there is one.
find_program(CCACHE_PROGRAM ccache)
mark_as_advanced(CCACHE_PROGRAM)
if(CCACHE_PROGRAM)
  # ccache makes paths below this folder relative, and does not count the folder in which a compiler runs, so that what
  # one clone has compiled serves another.
  set(launcher env CCACHE_BASEDIR=${CMAKE_CURRENT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${CCACHE_PROGRAM})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher} CACHE STRING "")
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${launcher} CACHE STRING "")
endif()
