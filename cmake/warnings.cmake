# Warnings for this project's own C++ code; errors when FLASHTILE_STRICT is on.
add_library(flashtile_warnings INTERFACE)
target_compile_options(
  flashtile_warnings
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;$<$<BOOL:${FLASHTILE_STRICT}>:-Werror>>
)
