# This file finds nvcc, or installs it from PyPI, and enables the language CUDA. It sets FLASHTILE_WITH_CUDA.
set(FLASHTILE_WITH_CUDA OFF)
set(FLASHTILE_CUDA_UNITS 0)
if(NOT FLASHTILE_CUDA MATCHES "^(AUTO|ON|OFF|PYPI)$")
  message(FATAL_ERROR "FLASHTILE_CUDA is ${FLASHTILE_CUDA}, expected AUTO, ON, OFF or PYPI")
endif()

# All five are pinned together, because nvcc's own requirements are not.
set(FLASHTILE_CUDA_PACKAGES
    nvidia-cuda-nvcc==13.0.88
    nvidia-nvvm==13.0.88
    nvidia-cuda-crt==13.0.88
    nvidia-cuda-cccl==13.0.85
    nvidia-cuda-runtime==13.0.96
)

if(FLASHTILE_CUDA STREQUAL PYPI)
  include(fetch)
  flashtile_pip_install(cuda-13.0.88 "${FLASHTILE_CUDA_PACKAGES}" cuda_dir)
  set(CMAKE_CUDA_COMPILER ${cuda_dir}/nvidia/cu13/bin/nvcc)
  # The packages have `lib` where nvcc looks for `lib64`.
  set(CMAKE_CUDA_FLAGS_INIT -L${cuda_dir}/nvidia/cu13/lib)
elseif(NOT FLASHTILE_CUDA STREQUAL OFF AND NOT CMAKE_CUDA_COMPILER)
  find_program(
    CMAKE_CUDA_COMPILER nvcc
    HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH
    PATHS /usr/local/cuda
    PATH_SUFFIXES bin
    DOC "The CUDA compiler"
  )
  if(NOT CMAKE_CUDA_COMPILER)
    if(FLASHTILE_CUDA STREQUAL ON)
      message(FATAL_ERROR "nvcc was not found on PATH, in CUDA_HOME or in /usr/local/cuda. "
                          "FLASHTILE_CUDA=PYPI installs it from PyPI; OFF builds the CPU kernels alone.")
    endif()
    unset(CMAKE_CUDA_COMPILER CACHE)
    return()
  endif()
endif()
if(FLASHTILE_CUDA STREQUAL OFF)
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES OFF)  # each row of the variant tables names its own
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old, 12.8 or newer is needed. "
                      "FLASHTILE_CUDA=PYPI installs one from PyPI; OFF builds the CPU kernels alone.")
endif()
set(FLASHTILE_WITH_CUDA ON)
