# SPDX-License-Identifier: Apache-2.0
# The command: golden cases (cases/<name>.cmd beside <name>.expected, run by golden.sh), and unit
# tests of its parts, which need its library.
if(SLUICE_CLI)
    file(GLOB SLUICE_CLI_CASES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/cases/*.cmd)
    foreach(case IN LISTS SLUICE_CLI_CASES)
        get_filename_component(name ${case} NAME_WE)
        add_test(NAME cli_${name} COMMAND ${CMAKE_CURRENT_LIST_DIR}/golden.sh $<TARGET_FILE:sluice>
            ${PROJECT_SOURCE_DIR} ${name})
        set_tests_properties(cli_${name} PROPERTIES LABELS quick TIMEOUT 60)
    endforeach()
    target_link_libraries(test_options PRIVATE sluice_cli)
    target_link_libraries(test_plan_svg PRIVATE sluice_cli)
endif()
