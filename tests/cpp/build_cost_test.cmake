# This file tests cmake/cost.cmake in a container: cmake -D scratch=FOLDER -P build_cost_test.cmake
list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR}/../../cmake)
include(${CMAKE_CURRENT_LIST_DIR}/expect.cmake)

set(cgroup ${scratch})
file(WRITE ${cgroup}/cpu.max "max 100000\n")
file(WRITE ${cgroup}/memory.max "max\n")
include(cost)
set(all_cores ${FLASHTILE_CORES})
expect([[all_cores GREATER_EQUAL 1]])
expect([[FLASHTILE_CUDA_JOBS GREATER_EQUAL 1 AND FLASHTILE_CUDA_JOBS LESS_EQUAL all_cores]])

# This container has nine tenths of a core, and memory for one unit.
file(WRITE ${cgroup}/cpu.max "90000 100000\n")
file(WRITE ${cgroup}/memory.max "5368709120\n")
include(cost)
expect([[FLASHTILE_CORES EQUAL 1]])
expect([[FLASHTILE_CUDA_JOBS EQUAL 1]])
expect([[FLASHTILE_MEMORY_MIB LESS_EQUAL 5120]])
file(WRITE ${cgroup}/cpu.max "99999900000 100000\n")
file(WRITE ${cgroup}/memory.max "1048576\n")  # memory for less than one unit
include(cost)
expect([[FLASHTILE_CORES EQUAL all_cores]])
expect([[FLASHTILE_CUDA_JOBS EQUAL 1]])

# The first two are for the machine that units were timed on, the last is a larger one.
set(FLASHTILE_CORES 2)
set(FLASHTILE_CUDA_JOBS 2)
flashtile_minutes(78 minutes)
expect([[minutes EQUAL 40]])
flashtile_minutes(0 minutes)
expect([[minutes EQUAL 1]])
set(FLASHTILE_CORES 16)
set(FLASHTILE_CUDA_JOBS 16)
flashtile_minutes(78 minutes)
expect([[minutes EQUAL 5]])
