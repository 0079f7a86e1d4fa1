# SPDX-License-Identifier: Apache-2.0
# Tests that the rule in CMakeLists.txt does not make: those of tests/<part>/*.cmake; style, headers,
# symbols and package (label `style`). And the set of threaded tests for the thread sanitizer (label
# `threads`).
file(GLOB SLUICE_TEST_EXTRAS CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*/*.cmake)
foreach(extra IN LISTS SLUICE_TEST_EXTRAS)
    include(${extra})
endforeach()

find_program(SLUICE_PYTHON python3)
set(SLUICE_TOOLS ${PROJECT_SOURCE_DIR}/tools)

if(NOT SLUICE_SANITIZE)
    # Sanitizers add symbols and change nothing about the text.
    find_program(SLUICE_CXX NAMES c++ g++ clang++)
    add_test(NAME style_headers COMMAND ${SLUICE_TOOLS}/check-headers.sh ${CMAKE_C_COMPILER}
        $<$<BOOL:${SLUICE_CXX}>:${SLUICE_CXX}> COMMAND_EXPAND_LISTS)
    add_test(NAME style_symbols COMMAND ${SLUICE_TOOLS}/check-symbols.sh
        $<TARGET_FILE:sluice_static> $<TARGET_FILE:sluice_shared>
        $<$<TARGET_EXISTS:sluice_cuda>:$<TARGET_FILE:sluice_cuda>> COMMAND_EXPAND_LISTS)
    add_test(NAME style_package COMMAND ${SLUICE_TOOLS}/check-package.sh ${PROJECT_BINARY_DIR}
        ${CMAKE_C_COMPILER})
    set_tests_properties(style_headers style_symbols style_package PROPERTIES LABELS style
        TIMEOUT 300)
    if(SLUICE_PYTHON)
        add_test(NAME style_code COMMAND ${SLUICE_PYTHON} ${SLUICE_TOOLS}/check-style.py)
        add_test(NAME style_includes COMMAND ${SLUICE_PYTHON} ${SLUICE_TOOLS}/check-includes.py)
        set_tests_properties(style_code style_includes PROPERTIES LABELS style TIMEOUT 300)
    endif()
endif()

# Every test that runs more than one thread of ours, but for one that is about decisions and takes
# minutes so.
add_custom_target(threaded_tests)
add_dependencies(threaded_tests kcheck)
foreach(source IN LISTS SLUICE_TEST_SOURCES)
    get_filename_component(name ${source} NAME_WE)
    get_filename_component(folder ${source} DIRECTORY)
    get_filename_component(part ${folder} NAME)
    if(name STREQUAL "test_adapt")
        continue()
    endif()
    if(name MATCHES "^test_(pool|device_sim|cpu_run)$" OR part STREQUAL "exec")
        get_test_property(${name} LABELS labels)
        set_tests_properties(${name} PROPERTIES LABELS "${labels};threads")
        add_dependencies(threaded_tests ${name})
    endif()
endforeach()
