# SPDX-License-Identifier: Apache-2.0
# Traces are read with the JSON library of the command.
if(SLUICE_CLI)
    target_link_libraries(test_trace PRIVATE sluice_cli)
endif()
