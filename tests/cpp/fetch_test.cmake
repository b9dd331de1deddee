# This file tests cmake/fetch.cmake without a network: cmake -D Python_EXECUTABLE=python -D scratch=FOLDER -P
# fetch_test.cmake. It calls itself once more, with CASE, to test what ends a configuration.
list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR}/../../cmake)
include(fetch)
include(${CMAKE_CURRENT_LIST_DIR}/expect.cmake)

if(CASE STREQUAL "another hash")
  flashtile_fetch(thing dir REQUIREMENT thing==1.0 SHA256 0123 FOLDER thing/wanted)
  return()
endif()

execute_process(COMMAND ${Python_EXECUTABLE} -m pip --version RESULT_VARIABLE without_pip OUTPUT_QUIET ERROR_QUIET)
if(without_pip)
  message("skipped: ${Python_EXECUTABLE} has no pip")
  return()
endif()

# This folder stands for PyPI. It has one package, whose wheel is an archive of a release as well.
file(REMOVE_RECURSE ${scratch})
set(FLASHTILE_CACHE_DIR ${scratch}/cache)
file(WRITE ${scratch}/wheel/thing/wanted/a.txt "a")
file(WRITE ${scratch}/wheel/thing/other/b.txt "b")
file(WRITE ${scratch}/wheel/thing-1.0.dist-info/METADATA "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
file(WRITE ${scratch}/wheel/thing-1.0.dist-info/WHEEL "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
file(WRITE ${scratch}/wheel/thing-1.0.dist-info/RECORD "")
set(wheel ${scratch}/packages/thing-1.0-py3-none-any.whl)
file(MAKE_DIRECTORY ${scratch}/packages)
execute_process(
  COMMAND ${CMAKE_COMMAND} -E tar cf ${wheel} --format=zip thing thing-1.0.dist-info
  WORKING_DIRECTORY ${scratch}/wheel COMMAND_ERROR_IS_FATAL ANY
)
file(SHA256 ${wheel} sha256)
set(ENV{PIP_NO_INDEX} 1)
set(ENV{PIP_FIND_LINKS} ${scratch}/packages)
set(ENV{PIP_CONFIG_FILE} /dev/null)

# A file with another hash ends the configuration, and nothing of it is in the cache.
execute_process(
  COMMAND ${CMAKE_COMMAND} -D "CASE=another hash" -D Python_EXECUTABLE=${Python_EXECUTABLE}
          -D FLASHTILE_CACHE_DIR=${FLASHTILE_CACHE_DIR} -P ${CMAKE_CURRENT_LIST_FILE}
  RESULT_VARIABLE failed ERROR_VARIABLE said OUTPUT_QUIET
)
string(REGEX REPLACE "[ \n]+" " " said "${said}")
expect([[failed]])
expect([[said MATCHES "has SHA-256 ${sha256}, expected 0123"]])
expect([[NOT EXISTS ${FLASHTILE_CACHE_DIR}/thing]])

# With the right hash, only the folder that was asked for is extracted; once it is there, no network is needed.
flashtile_fetch(thing dir REQUIREMENT thing==1.0 --python-version 3.11 SHA256 ${sha256} FOLDER thing/wanted)
expect([[dir STREQUAL ${FLASHTILE_CACHE_DIR}/thing/thing/wanted]])
expect([[EXISTS ${dir}/a.txt]])
expect([[NOT EXISTS ${FLASHTILE_CACHE_DIR}/thing/thing/other]])
flashtile_fetch(archive dir URL file://${wheel} SHA256 ${sha256} FOLDER thing/other)
expect([[EXISTS ${dir}/b.txt]])
file(REMOVE ${wheel})
flashtile_fetch(thing dir REQUIREMENT thing==1.0 SHA256 ${sha256} FOLDER thing/wanted)
expect([[EXISTS ${dir}/a.txt]])

# A file that cannot be downloaded gives NOTFOUND, and leaves nothing in the cache.
flashtile_fetch(absent dir REQUIREMENT thing==2.0 SHA256 ${sha256} FOLDER thing/wanted)
expect([[NOT dir]])
flashtile_fetch(absent dir URL file://${wheel} SHA256 ${sha256} FOLDER thing/wanted)
expect([[NOT dir]])
file(GLOB left RELATIVE ${FLASHTILE_CACHE_DIR} ${FLASHTILE_CACHE_DIR}/*)
expect([[left STREQUAL "archive;lock;thing"]])
