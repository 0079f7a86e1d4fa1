#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The kernels for Arm on an emulated processor: kcheck, cross-compiled, without what it does not
# need. Takes a cross compiler with qemu; exits 77 (skipped) without them. By default small shapes of
# every type, which are through in seconds; the large ones (--cases 16) take a minute and more.
#
#   tools/check-neon.sh [kcheck options]        default: --cpu neon --from 16 --cases 32 --threads 2
set -eu
cd "$(dirname "$0")/.."
compiler=aarch64-linux-gnu-gcc
if ! command -v "$compiler" >/dev/null || ! command -v qemu-aarch64 >/dev/null; then
    echo "check-neon: needs $compiler and qemu-aarch64" >&2
    exit 77
fi
out=${TMPDIR:-/tmp}/sluice-neon.$$
mkdir "$out"
trap 'rm -rf "$out"' EXIT INT TERM

# One object a source; those of cpu/arm for the processors that have what they use.
for source in src/base/*.c src/quant/*.c src/op/*.c src/cpu/*.c src/cpu/arm/*.c src/device/*.c \
    src/device/sim/*.c tests/kernels/*.c tests/cpu/amx_emulated.c; do
    flags=""
    case $source in src/cpu/arm/*) flags=-march=armv8.2-a+dotprod+fp16 ;; esac
    echo "$flags -c $source -o $out/$(echo "$source" | tr / _).o"
done | xargs -P 2 -L 1 "$compiler" -std=gnu17 -D_GNU_SOURCE -O2 -Iinclude -Isrc -Itests
"$compiler" "$out"/*.o -o "$out/kcheck" -lm -ldl -lpthread
[ $# -gt 0 ] || set -- --cpu neon --from 16 --cases 32 --threads 2
qemu-aarch64 -L /usr/aarch64-linux-gnu "$out/kcheck" "$@"
