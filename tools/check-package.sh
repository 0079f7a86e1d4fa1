#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Install a build into an empty folder and build a small program against it, as a user would: by
# pkg-config with the shared and with the static library, and by CMake's find_package. Each program
# runs. tools/check-package.sh BUILD CC
set -eu
build=$(cd "$1" && pwd)
cc=$2
tests=$(cd "$(dirname "$0")/../tests/package" && pwd)
work=$(mktemp -d "$build/package.XXXXXX")
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/prefix" >"$work/install.log"
pc=$(find "$work/prefix" -name sluice.pc)
PKG_CONFIG_PATH=$(dirname "$pc")
export PKG_CONFIG_PATH
libdir=$(pkg-config --variable=libdir sluice)

# shellcheck disable=SC2046 # lists of flags
"$cc" -Wall -Werror -o "$work/shared" "$tests/consumer.c" $(pkg-config --cflags --libs sluice)
LD_LIBRARY_PATH=$libdir "$work/shared"

# shellcheck disable=SC2046
"$cc" -Wall -Werror -o "$work/static" "$tests/consumer.c" $(pkg-config --cflags sluice) \
    "$libdir/libsluice.a" $(pkg-config --static --libs-only-l sluice | sed 's/-lsluice//')
"$work/static"

cmake -S "$tests" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_C_COMPILER="$cc" \
    >"$work/cmake.log" || { cat "$work/cmake.log"; exit 1; }
cmake --build "$work/cmake" >"$work/cmake.log" || { cat "$work/cmake.log"; exit 1; }
"$work/cmake/consumer_shared"
"$work/cmake/consumer_static"

if [ -x "$work/prefix/bin/sluice" ]; then
    "$work/prefix/bin/sluice" --version >/dev/null
fi
echo "package: installed and used four ways"
