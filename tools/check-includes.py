#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that each part of src/ includes only parts below it.

ORDER is the one list that says what "below" means; docs/design.md explains it. ONLY narrows it for
parts that must stay free of the rest.
"""
import pathlib
import re
import sys

ORDER = ["base", "quant", "gguf", "op", "cpu", "device", "model", "plan", "exec", "text", "synth",
         "api", "cli"]
ONLY = {"text": {"base", "gguf", "text"}}
# The stand-in for CUDA's headers when the kernels are compiled for the CPU (tests/device).
OUTSIDE = {"cuda_emulate.h"}
SUFFIXES = {".c", ".h", ".cu", ".cuh", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def check_file(path, part, src):
    problems = []
    for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
        if name in OUTSIDE:
            continue
        included = src / name
        if not included.exists():
            if (path.parent / name).exists():
                problems.append(f'{path}: "{name}" must be written from src/ on')
            else:
                problems.append(f'{path}: "{name}" does not exist')
            continue
        other = name.split("/")[0]
        allowed = ONLY.get(part, set(ORDER[: ORDER.index(part) + 1]))
        if other not in allowed:
            problems.append(f"{path}: {part} may not include {name}")
    return problems


def main():
    src = pathlib.Path(__file__).resolve().parent.parent / "src"
    problems = []
    n_files = 0
    for path in sorted(p for p in src.rglob("*") if p.suffix in SUFFIXES):
        part = path.relative_to(src).parts[0]
        if part not in ORDER:
            problems.append(f"{path}: part '{part}' is not in the list of parts")
            continue
        n_files += 1
        problems += check_file(path, part, src)
    print("\n".join(problems) if problems else f"includes: {n_files} files in order")
    if n_files == 0:
        print("includes: no files found")
    return 1 if problems or n_files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
