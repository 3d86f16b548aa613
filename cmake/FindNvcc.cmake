# Sets JOF_NVCC to nvcc's path, or to an empty string. Searches CUDACXX, then PATH and the toolkit's
# usual places, then the build environment's wheels nvidia-cuda-nvcc, -nvvm, -crt, -runtime and
# -cccl. For wheels, JOF_NVCC_LIBRARIES is their library folder, which nvcc does not search itself.
set(JOF_NVCC "")
set(JOF_NVCC_LIBRARIES "")
if(DEFINED ENV{CUDACXX} AND EXISTS "$ENV{CUDACXX}")
  set(JOF_NVCC "$ENV{CUDACXX}")
  return()
endif()

find_program(JOF_SYSTEM_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda
             PATH_SUFFIXES bin)
if(JOF_SYSTEM_NVCC)
  set(JOF_NVCC "${JOF_SYSTEM_NVCC}")
  return()
endif()

execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import importlib.util as u; s = u.find_spec('nvidia'); print(*(s.submodule_search_locations if s else []), sep=';')"
  OUTPUT_VARIABLE nvidia_dirs OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
foreach(dir IN LISTS nvidia_dirs)
  file(GLOB candidates "${dir}/cu*/bin/nvcc")
  foreach(candidate IN LISTS candidates)
    set(JOF_NVCC "${candidate}")
    cmake_path(SET JOF_NVCC_LIBRARIES NORMALIZE "${candidate}/../../lib")
  endforeach()
endforeach()
