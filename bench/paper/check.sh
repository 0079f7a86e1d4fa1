#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tries the scripts of this folder on a tiny model: cells are measured, a second call finds them
# done, and the report is made of them and of what was published.
#
#   check.sh PYTHON FOLDER_OF_SLUICE
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=$1
programs=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/models" "$folder/results" "$folder/docs"
export SLUICE_CACHE_DIR="$folder/cache" PYTHONDONTWRITEBYTECODE=1

run() {
    "$python" "$here/run.py" --bin "$programs" --out "$folder/results/tiny.json" --device cpu \
        --repeats 1 --models-folder "$folder/models" --shrink 64 --models qwen30b-Q4_0 \
        --budgets 2048,8192 --contexts 1024 --experiments table4,figure2 \
        --tiny "--arch llama --layers 2 --embd 256 --ff 512 --vocab 512" "$@"
}

fail() {
    echo "$1"
    cat "$folder/said"
    exit 1
}

# Two budgets, each as planned and with everything static.
run --time 0 >"$folder/said" 2>&1 || fail "a call without time failed"
grep -q "^0 of 4 cells are there, 4 left out" "$folder/said" || fail "a call without time measured"
run >"$folder/said" 2>&1 || fail "measuring failed"
grep -q "^4 of 4 cells are there, 0 left out" "$folder/said" || fail "not all cells were measured"
cp "$folder/results/tiny.json" "$folder/before"
run >"$folder/said" 2>&1 || fail "going on failed"
cmp -s "$folder/results/tiny.json" "$folder/before" || fail "cells were measured twice"
"$python" "$here/report.py" --results "$folder/results" --docs "$folder/docs" >"$folder/said" 2>&1 ||
    fail "the report failed"
grep -q "^| qwen30b-Q4_0 | 1K | [0-9.]* / 25.7 | – / 26.2 |" "$folder/docs/paper.md" ||
    fail "the report lacks a measured or a published figure"
"$python" "$here/report.py" --results "$folder/results" --docs "$folder/docs" --check \
    >"$folder/said" 2>&1 || fail "the report is not the same twice"
