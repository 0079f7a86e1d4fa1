#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Configure and build a preset: tools/build.sh PRESET [TARGET...]. Uses ccache when it is there.
# SLUICE_CMAKE_ARGS holds more options for CMake.
set -eu
cd "$(dirname "$0")/.."
preset=$1
shift

launcher=""
if command -v ccache >/dev/null 2>&1; then
    # Paths relative to the clone, so that a fresh clone elsewhere finds what was compiled before.
    export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1
    launcher="-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache"
fi
mkdir -p build
log=build/configure-$preset.log
# shellcheck disable=SC2086 # options
if ! cmake --preset "$preset" $launcher ${SLUICE_CMAKE_ARGS:-} >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
if [ $# -gt 0 ]; then
    set -- --target "$@"
fi
cmake --build "build/$preset" "$@"
