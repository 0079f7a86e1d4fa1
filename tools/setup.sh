#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# What building and testing Sluice needs on Debian 12. As root: installs what is missing. Otherwise:
# names it and fails. Elsewhere than on Debian: checks for the programs and libraries alone.
#
#   tools/setup.sh [check]     check: as root, also what only some tests need (they are skipped
#                              without): a compiler for Arm and an emulator, 50 MB
set -eu

packages="build-essential cmake ninja-build pkg-config libpcre2-dev libcmocka-dev libcjson-dev
          ccache python3 python3-venv ca-certificates clang-format"
if [ "${1:-}" = check ] && [ "$(id -u)" -eq 0 ] && [ "$(uname -m)" != aarch64 ]; then
    packages="$packages gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
fi

if ! command -v dpkg-query >/dev/null 2>&1; then
    missing=""
    for program in cc cmake ninja pkg-config python3; do
        command -v "$program" >/dev/null 2>&1 || missing="$missing $program"
    done
    if command -v pkg-config >/dev/null 2>&1; then
        for library in libpcre2-8 cmocka libcjson; do
            pkg-config --exists "$library" || missing="$missing $library"
        done
    fi
    [ -z "$missing" ] && exit 0
    echo "setup: please install (with headers):$missing" >&2
    exit 1
fi

missing=""
for package in $packages; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "setup: missing packages; please run as root:" >&2
    echo "    apt-get install$missing" >&2
    exit 1
fi
echo "setup: installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# shellcheck disable=SC2086 # a list of names
apt-get install -q -y --no-install-recommends $missing
