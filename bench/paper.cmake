# SPDX-License-Identifier: Apache-2.0
# The scripts that measure the paper's matrix, tried on a tiny model.
find_program(SLUICE_PYTHON python3)
if(SLUICE_PYTHON AND SLUICE_CLI)
    add_test(NAME bench_paper COMMAND ${CMAKE_CURRENT_LIST_DIR}/paper/check.sh ${SLUICE_PYTHON}
        $<TARGET_FILE_DIR:sluice>)
    set_tests_properties(bench_paper PROPERTIES LABELS full TIMEOUT 600)
endif()
