# Installs pinned packages, without what they depend on, into a folder of FLASHTILE_CACHE_DIR, once. The folder is
# the same for every build: a path that moved would recompile everything.
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
