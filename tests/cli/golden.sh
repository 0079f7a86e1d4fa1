#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs one case of tests/cli/cases and compares what it writes with what is expected.
#
#   golden.sh SLUICE SOURCE_DIR CASE          RECORD=1: writes CASE.expected instead
#
# CASE.cmd is a shell script, run in an empty folder with the command as `sluice`, the fixtures in
# $FIXTURES and the source tree in $SOURCE. CASE.expected holds its standard output, its standard
# error and its exit code. A case shows several commands' errors by sending them to standard output.
set -u
sluice=$1
SOURCE=$2
case=$3
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
for name in $(env | sed -n 's/^\(SLUICE_[A-Z_]*\)=.*/\1/p'); do
    unset "$name"
done
FIXTURES=$SOURCE/tests/fixtures
PATH=$(dirname "$sluice"):$PATH
SLUICE_CACHE_DIR=$folder/cache
LC_ALL=C
export SOURCE FIXTURES PATH SLUICE_CACHE_DIR LC_ALL
cases=$SOURCE/tests/cli/cases
mkdir "$folder/run"
(cd "$folder/run" && sh "$cases/$case.cmd" >"$folder/out" 2>"$folder/err" </dev/null)
code=$?
{
    echo "# standard output"
    cat "$folder/out"
    echo "# standard error"
    cat "$folder/err"
    echo "# exit code $code"
} >"$folder/found"
if [ "${RECORD:-0}" = 1 ]; then
    cp "$folder/found" "$cases/$case.expected"
else
    diff -u "$cases/$case.expected" "$folder/found"
fi
