# This file sets warnings for this project's own C++ code; they are errors when FLASHTILE_STRICT is on.
add_library(flashtile_warnings INTERFACE)
# A designated initialiser is meant to leave out fields that have their default, so this warning is off.
target_compile_options(
  flashtile_warnings
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wno-missing-field-initializers;$<$<BOOL:${FLASHTILE_STRICT}>:-Werror>>
)
# GCC 12 sees an overlap in std::string::replace that is not there, in GoogleTest's headers too.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(flashtile_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
