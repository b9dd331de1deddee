# Warnings for this project's own C++ code; errors when FLASHTILE_STRICT is on.
add_library(flashtile_warnings INTERFACE)
# A designated initialiser leaves out what has its default: that is what it is for.
target_compile_options(
  flashtile_warnings
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wno-missing-field-initializers;$<$<BOOL:${FLASHTILE_STRICT}>:-Werror>>
)
