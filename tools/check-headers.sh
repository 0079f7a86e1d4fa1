#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Compile each public header alone, as C11 and as C++11: tools/check-headers.sh CC [CXX]
set -eu
cc=$1
cxx=${2:-}
include=$(dirname "$0")/../include
n=0
result=0
for header in "$include"/sluice/*.h; do
    name=sluice/$(basename "$header")
    source="#include <$name>"
    printf '%s\n' "$source" | "$cc" -x c -std=c11 -pedantic -Wall -Wextra -Werror -fsyntax-only \
        -I "$include" - || { echo "headers: $name is no good C11"; result=1; }
    if [ -n "$cxx" ]; then
        printf '%s\n' "$source" | "$cxx" -x c++ -std=c++11 -pedantic -Wall -Wextra -Werror \
            -fsyntax-only -I "$include" - || { echo "headers: $name is no good C++11"; result=1; }
    fi
    n=$((n + 1))
done
echo "headers: $n compiled alone"
[ "$n" -gt 0 ] && exit $result
exit 1
