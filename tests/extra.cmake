# SPDX-License-Identifier: Apache-2.0
# Tests that are more than one source file. Included at the end of CMakeLists.txt.
include(${CMAKE_CURRENT_SOURCE_DIR}/kernels/kcheck.cmake OPTIONAL)
