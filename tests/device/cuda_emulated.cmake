# SPDX-License-Identifier: Apache-2.0
# The CUDA kernels' own source, run on the CPU: needs a C++ compiler, neither nvcc nor a GPU.
# Sanitizers know little of fibers that switch stacks, so that their builds leave these tests out.
include(CheckLanguage)
check_language(CXX)
if(CMAKE_CXX_COMPILER AND NOT SLUICE_SANITIZE)
    enable_language(CXX)
    foreach(name cuda_linear_emulated cuda_kernels_emulated cuda_experts_emulated)
        add_executable(test_${name} ${CMAKE_CURRENT_LIST_DIR}/${name}.cpp)
        set_target_properties(test_${name} PROPERTIES CXX_STANDARD 17)
        target_include_directories(test_${name} PRIVATE ${CMAKE_CURRENT_LIST_DIR}
            ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
        target_compile_options(test_${name} PRIVATE -Wall -Wextra -Wno-unknown-pragmas)
        target_link_libraries(test_${name} PRIVATE sluice_static)
        add_test(NAME test_${name} COMMAND test_${name})
        set_tests_properties(test_${name} PROPERTIES LABELS quick TIMEOUT 600)
    endforeach()
endif()
