# SPDX-License-Identifier: Apache-2.0
# kcheck: kernels against the reference, on every CPU level of this machine and on the sim device.
add_executable(kcheck
    ${CMAKE_CURRENT_LIST_DIR}/kcheck.c
    ${CMAKE_CURRENT_LIST_DIR}/kcheck_bounds.c
    ${CMAKE_CURRENT_LIST_DIR}/kcheck_cases.c
    ${CMAKE_CURRENT_LIST_DIR}/kcheck_experts.c
    ${CMAKE_CURRENT_LIST_DIR}/kcheck_instance.c
    ${CMAKE_CURRENT_LIST_DIR}/kcheck_target.c)
target_link_libraries(kcheck PRIVATE sluice_static sluice_flags test_shared_cpu)
target_include_directories(kcheck PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
set_target_properties(kcheck PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
add_test(NAME kcheck COMMAND kcheck)
add_test(NAME kcheck_sim COMMAND kcheck --device sim)
add_test(NAME kcheck_threads COMMAND kcheck --cpu scalar --cases 12)
if(NOT SLUICE_SANITIZE)
    add_test(NAME kcheck_neon COMMAND ${PROJECT_SOURCE_DIR}/tools/check-neon.sh)
    set_tests_properties(kcheck_neon PROPERTIES LABELS full PROCESSORS 2 SKIP_RETURN_CODE 77
        TIMEOUT 600)
endif()
add_test(NAME kcheck_full COMMAND kcheck --cases 500 --seed 2)
set_tests_properties(kcheck kcheck_sim PROPERTIES LABELS quick TIMEOUT 300)
set_tests_properties(kcheck_threads PROPERTIES LABELS "quick;threads" TIMEOUT 300)
set_tests_properties(kcheck_full PROPERTIES LABELS full TIMEOUT 3600)
