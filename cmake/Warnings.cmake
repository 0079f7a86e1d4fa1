# SPDX-License-Identifier: Apache-2.0
# Warnings and sanitizers shared by every target.
add_library(sluice_flags INTERFACE)
target_compile_options(sluice_flags INTERFACE -Wall -Wextra
    "$<$<COMPILE_LANGUAGE:C>:-Wshadow;-Wpointer-arith;-Wstrict-prototypes;-Wmissing-prototypes;-Wvla;-Wcast-qual;-Wwrite-strings>")
# A text that snprintf cuts is well defined, and gcc reports every one that it cannot rule out.
target_compile_options(sluice_flags INTERFACE -Wno-format-truncation)
target_compile_definitions(sluice_flags INTERFACE _GNU_SOURCE)
if(SLUICE_WERROR)
    target_compile_options(sluice_flags INTERFACE -Werror)
endif()
if(SLUICE_SANITIZE)
    target_compile_options(sluice_flags INTERFACE -fsanitize=${SLUICE_SANITIZE}
        -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(sluice_flags INTERFACE -fsanitize=${SLUICE_SANITIZE})
endif()
