#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make docs/kernels.md from the newest file in bench/results/kernels, and from nothing else.

    tools/kernel_table.py            write the page
    tools/kernel_table.py --check    write nothing; fail when it is not up to date

A file is what `bench/gpu_run.py ... kernels` writes: an object that says when and where, with the rows
of `bench-cuda_linear --json`.
"""
import argparse
import json
import pathlib
import sys

import results_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "kernels"
PAGE = ROOT / "docs" / "kernels.md"
FEW = (1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 24, 32, 48, 64)
MANY = (512, 1024, 2048)

INTRO = """# Matrix products on the GPU

Written by `tools/kernel_table.py` from the newest file in `bench/results/kernels`; do not edit. Packing of
the activations is counted in. Why some are where they are, and what was tried: [attempts.md](attempts.md).

{machine}, {date}, commit {commit}: `{command}`. Limits: a copy in VRAM reads and writes {copy_gb_per_s:.0f} GB/s,
the tensor cores were measured at {tensor_tflop_per_s} TFLOP/s (bf16).
"""


def table(header, lines):
    return results_table.table(header, ["---"] + ["---:"] * (len(header) - 1), lines)


def share(row, name, limit):
    return f"{row[name]:.0f} ({100 * row[name] / limit:.0f} %)" if row else ""


def page(data):
    found = {(r["type"], r["rows"], r["cols"], r["tokens"]): r for r in data["rows"]}
    types = list(dict.fromkeys(r["type"] for r in data["rows"]))
    shapes = list(dict.fromkeys((r["rows"], r["cols"]) for r in data["rows"]))
    names = [f"{rows} x {cols}" for rows, cols in shapes]
    text = INTRO.format(**data)
    text += "\n## One token: GB/s of weights, and of the copy's rate\n\n" + table(
        ["type"] + names,
        [[t] + [share(found.get((t, *shape, 1)), "gb_per_s", data["copy_gb_per_s"])
                for shape in shapes] for t in types])
    for tokens in MANY:
        text += f"\n## {tokens} tokens: TFLOP/s, and of the tensor cores' rate\n\n" + table(
            ["type"] + names,
            [[t] + [share(found.get((t, *shape, tokens)), "tflop_per_s", data["tensor_tflop_per_s"])
                    for shape in shapes] for t in types])
    shape = shapes[0]
    text += f"\n## From 1 to 64 tokens: us, {names[0]}\n\n" + table(
        ["type"] + [str(n) for n in FEW],
        [[t] + [f"{found[(t, *shape, n)]['us']:.1f}" if (t, *shape, n) in found else ""
                for n in FEW] for t in types])
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    text = page(json.loads(sorted(RESULTS.glob("*.json"))[-1].read_text(encoding="utf-8")))
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
    if args.check:
        if stale:
            print("docs/kernels.md is not up to date; run tools/kernel_table.py", file=sys.stderr)
        return int(stale)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
