#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make docs/kernels.md from the newest files of either kind in bench/results/kernels, and from
nothing else.

    tools/kernel_table.py            write the page
    tools/kernel_table.py --check    write nothing; fail when it is not up to date

Files are what `bench/gpu_run.py ... products operators` writes: objects that say when and where, with
the rows of `bench-cuda_linear --json` and `bench-cuda_ops --json`.
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

INTRO = """# Kernels on the GPU

Written by `tools/kernel_table.py` from the newest files in `bench/results/kernels`; do not edit. Why some are where
they are, and what was tried: [attempts.md](attempts.md).

## Matrix products

Packing of the activations is counted in.

{machine}, {date}, commit {commit}: `{command}`. Limits: a copy in VRAM reads and writes {copy_gb_per_s:.0f} GB/s,
the tensor cores were measured at {tensor_tflop_per_s} TFLOP/s (bf16).
"""


def table(header, lines):
    return results_table.table(header, ["---"] + ["---:"] * (len(header) - 1), lines)


def ratio(value, limit):
    return f"{value:.0f} ({100 * value / limit:.0f} %)"


def share(row, name, limit):
    return ratio(row[name], limit) if row else ""


OPERATORS = """
## Other operators

{machine}, {date}, commit {commit}: `{command}`, against the same limits. Heads of 128, 32 of them to 8 KV heads; 128
experts of 2048 x 768, 8 for a token.
"""


def operators(data, copy_rate):
    rows, tensor = data["rows"], data["tensor_tflop_per_s"]
    attention = [r for r in rows if r["op"] == "attention"]
    depths = sorted({r["depth"] for r in attention})
    passes = sorted({r["tokens"] for r in attention})
    text = OPERATORS.format(**data)

    def line(kind, n, cell):
        found = {r["depth"]: r for r in attention if r["type"] == kind and r["tokens"] == n}
        return [kind] + [cell(found[d]) if d in found else "" for d in depths]

    kinds = list(dict.fromkeys(r["type"] for r in attention))
    text += "\n### Attention of one token: GB/s of the cache, by depth\n\n" + table(
        ["cache"] + [str(d) for d in depths],
        [line(kind, passes[0], lambda r: ratio(r["gb_per_s"], copy_rate)) for kind in kinds])
    text += f"\n### Attention of {passes[-1]} tokens: TFLOP/s, by the depth where they end\n\n" + table(
        ["cache"] + [str(d) for d in depths],
        [line(kind, passes[-1], lambda r: ratio(r["tflop_per_s"], tensor)) for kind in kinds])
    experts = [r for r in rows if r["op"] == "experts"]
    kinds = list(dict.fromkeys(r["type"] for r in experts))
    found = {(r["type"], r["tokens"]): r for r in experts}
    text += ("\n### Experts: us; up to 64 tokens GB/s of those that are used, beyond TFLOP/s\n\n" + table(
        ["tokens"] + kinds,
        [[str(n)] + [f"{r['us']:.0f}; " + (ratio(r["gb_per_s"], copy_rate) if n <= 64
                                           else ratio(r["tflop_per_s"], tensor))
                     for r in (found[kind, n] for kind in kinds)]
         for n in sorted({r["tokens"] for r in experts})]))
    routers = [r for r in rows if r["op"] == "router"]
    return text + "\n### Router in float: us\n\n" + table(
        ["tokens"] + [str(r["tokens"]) for r in routers],
        [["us"] + [f"{r['us']:.1f}" for r in routers]])


def page(data, others):
    found = {(r["type"], r["rows"], r["cols"], r["tokens"]): r for r in data["rows"]}
    types = list(dict.fromkeys(r["type"] for r in data["rows"]))
    shapes = list(dict.fromkeys((r["rows"], r["cols"]) for r in data["rows"]))
    names = [f"{rows} x {cols}" for rows, cols in shapes]
    text = INTRO.format(**data)
    text += "\n### One token: GB/s of weights, and of the copy's rate\n\n" + table(
        ["type"] + names,
        [[t] + [share(found.get((t, *shape, 1)), "gb_per_s", data["copy_gb_per_s"])
                for shape in shapes] for t in types])
    for tokens in MANY:
        text += f"\n### {tokens} tokens: TFLOP/s, and of the tensor cores' rate\n\n" + table(
            ["type"] + names,
            [[t] + [share(found.get((t, *shape, tokens)), "tflop_per_s", data["tensor_tflop_per_s"])
                    for shape in shapes] for t in types])
    shape = shapes[0]
    text += f"\n### From 1 to 64 tokens: us, {names[0]}\n\n" + table(
        ["type"] + [str(n) for n in FEW],
        [[t] + [f"{found[(t, *shape, n)]['us']:.1f}" if (t, *shape, n) in found else ""
                for n in FEW] for t in types])
    return text + operators(others, data["copy_gb_per_s"])


def newest(name):
    return json.loads(sorted(RESULTS.glob(f"*-{name}.json"))[-1].read_text(encoding="utf-8"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    text = page(newest("products"), newest("operators"))
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
    if args.check:
        if stale:
            print("docs/kernels.md is not up to date; run tools/kernel_table.py", file=sys.stderr)
        return int(stale)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
