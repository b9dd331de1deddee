# This file is for tests of the build itself. expect() ends the script where a condition, as if() takes them, does not
# hold.
function(expect condition)
  cmake_language(EVAL CODE "if(${condition})\nset(holds ON)\nendif()")
  if(NOT holds)
    message(FATAL_ERROR "does not hold: ${condition}")
  endif()
endfunction()
