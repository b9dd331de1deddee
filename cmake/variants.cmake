# This file turns the variant tables (cpp/variants/*.def) into CUDA translation units, which have the code of a template
# for each of some CUDA rows.

# These are the targets of each architecture's rows. One front-end pass makes one PTX and from it machine code for
# several GPUs; the PTX itself is included for GPUs that are newer than these.
set(FLASHTILE_GENCODE_sm80 arch=compute_80,code=[sm_80,sm_90,compute_80])
set(FLASHTILE_GENCODE_sm90 arch=compute_90a,code=sm_90a)
# Kernels that need no row of a table run on every GPU, and so do rows that are marked `also for Hopper`. On Hopper they
# let the next kernel start early, which Ampere's PTX cannot express: its machine code there is made from other PTX.
set(FLASHTILE_GENCODE_every_gpu -gencode=arch=compute_80,code=[sm_80,compute_80] -gencode=arch=compute_90,code=sm_90)
set(FLASHTILE_CUDA_ARCHITECTURES "sm_80, sm_90, sm_90a, compute_80")

# These widths of Hopper's matmuls are in CuTe's default set; the others cost 20 seconds of compilation.
set(FLASHTILE_SM90_WIDTHS 8 16 32 64 96 128 192 256)

# FLASHTILE_STRICT adds these options to every row that is not marked `may spill`.
set(FLASHTILE_NO_SPILLS -Xptxas=--warn-on-spills,--warning-as-error)

# Reads the rows `MACRO(arch, dtype, head_dim, head_dim_v, M, N, stages, warps, features)` of `table` and generates
# files of the code that `template` has for each CUDA row. It appends the files to `out_sources`.
#
# Rows that differ in no more than their tiles, and in which of the dtypes with as many bits they have, share a file if
# they are compiled with the same options: headers and most templates are the same for them, so that four rows take as
# long to compile as two files of one. `also for Hopper` in a row's comment says for what it is compiled; files of rows
# whose comment has `may spill: why` get the source property FLASHTILE_MAY_SPILL.
function(flashtile_variant_sources table template out_sources)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table} ${template})
  get_filename_component(KIND ${table} NAME_WE)
  string(SUBSTRING ${KIND} 0 1 initial)
  string(SUBSTRING ${KIND} 1 -1 Kind)
  string(TOUPPER ${initial} initial)
  string(PREPEND Kind ${initial})
  file(READ ${template} code)
  file(STRINGS ${table} rows REGEX "^[A-Z]+\\( *sm")
  set(units)
  foreach(row IN LISTS rows)
    if(NOT row MATCHES
       "^[A-Z]+\\( *(sm[0-9]+), *([a-z0-9]+), *([0-9]+), *([0-9]+), *([0-9]+), *([0-9]+), *([0-9]+), *([0-9]+), *([a-z_]+)\\)( *//.*)?$")
      message(FATAL_ERROR "${table}: this row cannot be read: ${row}")
    endif()
    set(ARCH ${CMAKE_MATCH_1})
    set(DTYPE ${CMAKE_MATCH_2})
    set(HEAD_DIM ${CMAKE_MATCH_3})
    set(HEAD_DIM_V ${CMAKE_MATCH_4})
    set(TILE_M ${CMAKE_MATCH_5})
    set(TILE_N ${CMAKE_MATCH_6})
    set(STAGES ${CMAKE_MATCH_7})
    set(WARPS ${CMAKE_MATCH_8})
    set(FEATURES ${CMAKE_MATCH_9})
    string(REGEX MATCH "//.*$" comment "${row}")
    set(NAME ${ARCH}_${DTYPE}_d${HEAD_DIM}_v${HEAD_DIM_V}_m${TILE_M}_n${TILE_N}_s${STAGES}_w${WARPS}_${FEATURES})

    set(unit ${KIND}_${ARCH}_d${HEAD_DIM}_v${HEAD_DIM_V}_${FEATURES})
    if(DTYPE MATCHES "^e[0-9]m[0-9]$")
      string(APPEND unit _of_8_bits)
    endif()
    set(gencode -gencode=${FLASHTILE_GENCODE_${ARCH}})
    if(comment MATCHES "also for Hopper")
      string(APPEND unit _also_for_hopper)
      set(gencode "${FLASHTILE_GENCODE_every_gpu}")
    endif()
    if(comment MATCHES "may spill:")
      string(APPEND unit _may_spill)
    endif()
    set(source ${CMAKE_BINARY_DIR}/variants/${unit}.cu)
    if(NOT unit IN_LIST units)
      list(APPEND units ${unit})
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${gencode}")
      cmake_path(RELATIVE_PATH table BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} OUTPUT_VARIABLE name)
      set(code_of_${unit} "// This file has rows of ${name}.\n")
    endif()
    string(CONFIGURE "${code}" code_of_row @ONLY)
    string(APPEND code_of_${unit} "\n${code_of_row}")
    # A backward whose head dimension is no multiple of 64 has matmuls of half of it (see BackwardOnePassSm90).
    set(widths ${TILE_M} ${TILE_N})
    math(EXPR rest "${HEAD_DIM} % 64")
    math(EXPR half "${HEAD_DIM} / 2")
    if(KIND STREQUAL "backward" AND rest)
      list(APPEND widths ${half})
    endif()
    list(REMOVE_ITEM widths ${FLASHTILE_SM90_WIDTHS})
    if(ARCH STREQUAL "sm90" AND widths)
      set_source_files_properties(${source} PROPERTIES COMPILE_DEFINITIONS CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED)
    endif()
    if(comment MATCHES "may spill:")
      set_source_files_properties(${source} PROPERTIES FLASHTILE_MAY_SPILL ON)
    endif()
  endforeach()
  set(sources ${${out_sources}})
  foreach(unit IN LISTS units)
    set(source ${CMAKE_BINARY_DIR}/variants/${unit}.cu)
    file(CONFIGURE OUTPUT ${source} CONTENT "${code_of_${unit}}" @ONLY)
    list(APPEND sources ${source})
  endforeach()
  set(${out_sources} ${sources} PARENT_SCOPE)
endfunction()

# Defines the library `target` of all CUDA kernels.
function(flashtile_add_kernels target)
  set(variants ${CMAKE_CURRENT_SOURCE_DIR}/cpp/variants)
  flashtile_variant_sources(${variants}/forward.def ${variants}/variant.cu.in sources)
  flashtile_variant_sources(${variants}/backward.def ${variants}/variant.cu.in sources)
  flashtile_variant_sources(${variants}/kvcache.def ${variants}/variant.cu.in sources)
  flashtile_variant_sources(${variants}/invariant.def ${variants}/invariant.cu.in sources)
  list(LENGTH sources count)
  set(FLASHTILE_CUDA_UNITS ${count} PARENT_SCOPE)

  set(for_every_gpu cpp/cuda/append.cu cpp/cuda/begin_max_logits.cu cpp/cuda/join_gradients.cu cpp/cuda/join_parts.cu
                    cpp/cuda/mask_words.cu cpp/cuda/merge.cu cpp/cuda/order_tiles.cu cpp/cuda/prefill.cu
                    cpp/cuda/prepare_backward.cu cpp/cuda/quantize.cu cpp/cuda/quantize_ragged.cu cpp/cuda/widen.cu
  )
  set_source_files_properties(${for_every_gpu} PROPERTIES COMPILE_OPTIONS "${FLASHTILE_GENCODE_every_gpu}")
  add_library(${target} STATIC ${sources} ${for_every_gpu} cpp/cuda/tensor_map.cpp)
  target_include_directories(${target} PRIVATE include cpp)
  target_link_libraries(${target} PRIVATE $<BUILD_LOCAL_INTERFACE:flashtile_cutlass;flashtile_warnings>)
  target_compile_definitions(
    ${target} PUBLIC $<BUILD_INTERFACE:FLASHTILE_WITH_CUDA>
                     $<BUILD_INTERFACE:FLASHTILE_CUDA_ARCHITECTURES="${FLASHTILE_CUDA_ARCHITECTURES}">
  )
  # The host side of the core calls the CUDA runtime: the headers are public, the library is linked statically.
  target_include_directories(${target} SYSTEM PUBLIC "$<BUILD_INTERFACE:${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}>")
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--compress-mode=size>
  )
  set_target_properties(${target} PROPERTIES CUDA_STANDARD 20 CUDA_ARCHITECTURES OFF JOB_POOL_COMPILE nvcc)

  if(FLASHTILE_STRICT)
    foreach(source IN LISTS sources)
      get_source_file_property(may_spill ${source} FLASHTILE_MAY_SPILL)
      if(NOT may_spill)
        set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${FLASHTILE_NO_SPILLS})
      endif()
    endforeach()
  endif()
endfunction()
