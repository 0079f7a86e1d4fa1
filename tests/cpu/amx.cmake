# SPDX-License-Identifier: Apache-2.0
# Emulated tiles replace AMX alone: the rest of the kernels needs its instruction sets.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/amx_emulated.c PROPERTIES
        COMPILE_OPTIONS "-mavx2;-mfma;-mf16c;-mbmi2;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512vnni;-mavx512vbmi;-mavx512bf16;-O2")
endif()
