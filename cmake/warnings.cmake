# Warnings for this project's own C++ code; errors when FLASHTILE_STRICT is on.
add_library(flashtile_warnings INTERFACE)
# A designated initialiser leaves out what has its default: that is what it is for.
target_compile_options(
  flashtile_warnings
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wno-missing-field-initializers;$<$<BOOL:${FLASHTILE_STRICT}>:-Werror>>
)
# GCC 12 sees an overlap in std::string::replace that is not there, in GoogleTest's headers too.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(flashtile_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
