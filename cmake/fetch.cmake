# This file fetches what a build needs and this repository does not hold: pinned, fetched once, and kept in a folder of
# FLASHTILE_CACHE_DIR that is the same for every build, as a path that moved would recompile everything.

# Installs `packages`, without their dependencies, into the folder `name`.
function(flashtile_pip_install name packages out_dir)
  set(dir ${FLASHTILE_CACHE_DIR}/${name})
  set(${out_dir} ${dir} PARENT_SCOPE)
  file(LOCK ${FLASHTILE_CACHE_DIR}/lock GUARD FUNCTION)
  if(EXISTS ${dir})
    return()
  endif()
  list(JOIN packages " " words)
  message(STATUS "Installing ${words} into ${dir}")
  file(REMOVE_RECURSE ${dir}.part)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -m pip install --quiet --no-deps --no-compile --target ${dir}.part ${packages}
    COMMAND_ERROR_IS_FATAL ANY
  )
  file(RENAME ${dir}.part ${dir})
endfunction()

# Downloads one file, from `URL` or as the wheel of `REQUIREMENT` (a package and its version; further words are passed
# to pip), checks its SHA-256, and extracts its folder `FOLDER`. It sets `out_dir` to that folder in the cache, or to
# NOTFOUND where the file cannot be downloaded, with a message that says why.
function(flashtile_fetch name out_dir)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "URL;SHA256;FOLDER" "REQUIREMENT")
  set(dir ${FLASHTILE_CACHE_DIR}/${name})
  set(${out_dir} ${dir}/${arg_FOLDER} PARENT_SCOPE)
  file(LOCK ${FLASHTILE_CACHE_DIR}/lock GUARD FUNCTION)
  if(EXISTS ${dir})
    return()
  endif()
  message(STATUS "Downloading ${name} into ${FLASHTILE_CACHE_DIR}")
  set(part ${dir}.part)
  file(REMOVE_RECURSE ${part})
  if(arg_URL)
    set(file ${part}/archive)
    file(DOWNLOAD ${arg_URL} ${file} STATUS status TIMEOUT 120)
    list(POP_FRONT status failed reason)
  else()
    execute_process(
      COMMAND ${Python_EXECUTABLE} -m pip download --quiet --no-deps --only-binary :all: --dest ${part}
              ${arg_REQUIREMENT}
      RESULT_VARIABLE failed
      ERROR_VARIABLE reason
    )
    file(GLOB file ${part}/*.whl)
  endif()
  if(failed)
    string(STRIP "${reason}" reason)
    message(STATUS "${name} could not be downloaded: ${reason}")
    file(REMOVE_RECURSE ${part})
    set(${out_dir} NOTFOUND PARENT_SCOPE)
    return()
  endif()
  file(SHA256 ${file} sha256)
  if(NOT sha256 STREQUAL arg_SHA256)
    message(FATAL_ERROR "${file} has SHA-256 ${sha256}, expected ${arg_SHA256}")
  endif()
  file(ARCHIVE_EXTRACT INPUT ${file} DESTINATION ${part} PATTERNS ${arg_FOLDER}/*)
  file(REMOVE ${file})
  file(RENAME ${part} ${dir})
endfunction()
