# SPDX-License-Identifier: Apache-2.0
# The CUDA kernels' own source, run on the CPU: needs a C++ compiler, neither nvcc nor a GPU.
# Sanitizers know little of fibers that switch stacks, so that their builds leave this test out.
include(CheckLanguage)
check_language(CXX)
if(CMAKE_CXX_COMPILER AND NOT SLUICE_SANITIZE)
    enable_language(CXX)
    add_executable(test_cuda_linear_emulated ${CMAKE_CURRENT_LIST_DIR}/cuda_linear_emulated.cpp)
    set_target_properties(test_cuda_linear_emulated PROPERTIES CXX_STANDARD 17)
    target_include_directories(test_cuda_linear_emulated PRIVATE ${CMAKE_CURRENT_LIST_DIR}
        ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
    target_compile_options(test_cuda_linear_emulated PRIVATE -Wall -Wextra -Wno-unknown-pragmas)
    target_link_libraries(test_cuda_linear_emulated PRIVATE sluice_static)
    add_test(NAME test_cuda_linear_emulated COMMAND test_cuda_linear_emulated)
    set_tests_properties(test_cuda_linear_emulated PROPERTIES LABELS quick TIMEOUT 600)
endif()
