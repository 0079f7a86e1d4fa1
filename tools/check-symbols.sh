#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Check the names that the libraries give to the linker, so that they cannot clash with those of a
# host program: tools/check-symbols.sh STATIC SHARED [CUDA]
set -eu
static=$1
shared=$2
cuda=${3:-}

# Names that are defined for others and do not match the pattern. Fails when there are none at all.
check() { # what, pattern, nm output
    names=$(printf '%s\n' "$3" | awk 'NF >= 3 { print $3 }' | sort -u)
    if [ -z "$names" ]; then
        echo "symbols: $1 defines nothing"
        return 1
    fi
    if bad=$(printf '%s\n' "$names" | grep -vE "$2"); then
        echo "symbols: $1 has names outside of the project's:"
        printf '%s\n' "$bad"
        return 1
    fi
    echo "symbols: $1: $(printf '%s\n' "$names" | wc -l) names are fine"
}

result=0
check "the static library" '^(sl|sluice)_' "$(nm -g --defined-only "$static")" || result=1
check "the shared library" '^sluice_' "$(nm -D --defined-only "$shared")" || result=1
if [ -n "$cuda" ]; then
    check "the CUDA library" '^sl_cuda_device_create$' "$(nm -D --defined-only "$cuda")" || result=1
fi
exit $result
