# This file finds what a build costs on this machine. It sets FLASHTILE_CORES and FLASHTILE_MEMORY_MIB, which are this
# machine's or what its container is limited to, and FLASHTILE_CUDA_JOBS, the number of CUDA units that are compiled at
# once.
cmake_host_system_information(RESULT FLASHTILE_CORES QUERY NUMBER_OF_LOGICAL_CORES)
cmake_host_system_information(RESULT FLASHTILE_MEMORY_MIB QUERY TOTAL_PHYSICAL_MEMORY)
if(NOT cgroup)
  set(cgroup /sys/fs/cgroup)
endif()
if(EXISTS ${cgroup}/cpu.max)  # "150000 100000" is CPU time per period, in µs; "max 100000" is no limit
  file(READ ${cgroup}/cpu.max limit)
  if(limit MATCHES "^([0-9]+) ([0-9]+)")
    math(EXPR limit "(${CMAKE_MATCH_1} + ${CMAKE_MATCH_2} - 1) / ${CMAKE_MATCH_2}")
    if(limit LESS FLASHTILE_CORES)
      set(FLASHTILE_CORES ${limit})
    endif()
  endif()
endif()
if(EXISTS ${cgroup}/memory.max)  # bytes, or "max"
  file(READ ${cgroup}/memory.max limit)
  if(limit MATCHES "^[0-9]+")
    math(EXPR limit "${CMAKE_MATCH_0} / 1048576")
    if(limit LESS FLASHTILE_MEMORY_MIB)
      set(FLASHTILE_MEMORY_MIB ${limit})
    endif()
  endif()
endif()

# A unit of CuTe code takes up to 4 GB to compile, so memory limits the number of jobs as much as the cores do.
math(EXPR FLASHTILE_CUDA_JOBS "${FLASHTILE_MEMORY_MIB} / 4096")
if(FLASHTILE_CUDA_JOBS GREATER FLASHTILE_CORES)
  set(FLASHTILE_CUDA_JOBS ${FLASHTILE_CORES})
elseif(FLASHTILE_CUDA_JOBS LESS 1)
  set(FLASHTILE_CUDA_JOBS 1)
endif()
set_property(GLOBAL APPEND PROPERTY JOB_POOLS nvcc=${FLASHTILE_CUDA_JOBS})

# Sets `out` to about how many minutes a build with this many CUDA units takes. It is measured on two cores: 56 of 78
# units took 60 seconds each in the mean, two at a time, and all else took 66 seconds of one core.
function(flashtile_minutes cuda_units out)
  math(EXPR minutes "(60 * ${cuda_units} / ${FLASHTILE_CUDA_JOBS} + 66 / ${FLASHTILE_CORES} + 59) / 60")
  set(${out} ${minutes} PARENT_SCOPE)
endfunction()
