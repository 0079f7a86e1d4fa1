#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the paper's matrix on this machine, as much of it as there is time for.

    bench/paper/run.py --bin DIR --out FILE.json [--time SECONDS] [--experiments table4,...]
                       [--models minitron8b-F16,...] [--contexts 1024,...] [--budgets 2048,...]

FILE.json (in bench/results/paper) is read at the start and written after every call of the program,
which measures one context under several budgets: what is in it is not measured again, so that the
next call goes on where this one ended. Budgets are begun only when they should fit into the time
that is left. Models are made in --models-folder by `sluice synth` when
they are not there. Then bench/paper/report.py makes the tables. Only the standard library is needed.
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import experiments as ex

RESERVE_S = 2  # kept for writing at the end


class Runner:
    def __init__(self, args):
        self.args = args
        self.end = time.monotonic() + args.time
        self.out = pathlib.Path(args.out)
        self.rows = json.loads(self.out.read_text(encoding="utf-8")) if self.out.exists() else []
        self.done = {ex.row_key(row) for row in self.rows}
        self.took = {}  # seconds of a cell by (model, context, batch), the last
        self.skipped = []
        self.help = subprocess.run([self.program(), "bench", "--help"], capture_output=True,
                                   text=True, check=False).stdout

    def program(self):
        return os.path.join(self.args.bin, "sluice")

    def left(self):
        return self.end - time.monotonic() - RESERVE_S

    def save(self):
        self.out.parent.mkdir(parents=True, exist_ok=True)
        half = self.out.with_suffix(".tmp")
        half.write_text(json.dumps(self.rows, indent=1) + "\n", encoding="utf-8")
        half.replace(self.out)

    def skip(self, cells, why):
        self.skipped += [f"{cell}: {why}" for cell in cells]

    def model(self, name):
        """Path of the model's file, or None when there is no room or time to make it."""
        path = pathlib.Path(self.args.models_folder) / f"{name}.gguf"
        if path.exists():
            return path
        model = next(m for m in ex.MODELS if m.name == name)
        room = shutil.disk_usage(self.args.models_folder).free
        if self.args.tiny is None and (room < 1.05 * model.gib * 2 ** 30 or
                                       self.left() < model.gib / 2):  # made at 2 GiB/s or so
            return None
        shape = ["--shape", model.shape] if self.args.tiny is None else self.args.tiny.split()
        half = path.with_suffix(".part")
        done = subprocess.run([self.program(), "synth", *shape, "--type", model.kind, str(half)],
                              capture_output=True, check=False)
        if done.returncode != 0:
            half.unlink(missing_ok=True)
            return None
        half.replace(path)
        return path

    def command(self, group, path):
        cell = group[0]
        words = [self.program(), "bench", "-m", str(path), "-o", "json", "--device",
                 self.args.device, "--vram", ",".join(f"{c.budget_mib}M" for c in group), "-p",
                 str(cell.context // self.args.shrink), "-n", str(self.args.generate), "--after-prompt",
                 "-r", str(self.args.repeats), "--strategy", cell.strategy]
        if self.args.threads > 0:
            words += ["-t", str(self.args.threads)]
        if cell.batch > 1:
            words += ["--parallel", str(cell.batch)]
        return words

    def add(self, cell, row):
        row = dict(row, model=cell.model, context=cell.context, budget_mib=cell.budget_mib,
                   batch=cell.batch, strategy=cell.strategy)
        if row.get("prompt_tokens"):
            seconds = {name: row["prompt_tokens"] / row[name]
                       for name in ("value", "predicted", "corrected") if row.get(name)}
            self.rows.append(dict(row, metric="ttft_s", unit="s", **seconds))
        self.rows.append(row)

    def expected(self, cell):
        guess = ex.expected_seconds(cell, self.args.repeats, self.args.generate)
        return self.took.get((cell.model, cell.context, cell.batch), guess)

    def that_fit(self, group):
        """The first cells of a group that there is time for."""
        left, fit = self.left(), []
        for cell in group:
            left -= self.expected(cell)
            if left < 0:
                break
            fit.append(cell)
        return fit

    def run(self, group):
        """Measure cells that differ in their budgets alone, in one call: opening a model takes time."""
        pending = [cell for cell in group if cell.key() not in self.done]
        if not pending:
            return
        if pending[0].batch > 1 and "--parallel" not in self.help:
            return self.skip(pending, "this build generates one sequence at a time")
        fit = self.that_fit(pending)
        self.skip(pending[len(fit):], "no time left")
        if not fit:
            return
        path = self.model(fit[0].model)
        if path is None:
            return self.skip(fit, "no room or time for the model")
        words = self.command(fit, path)
        start = time.monotonic()
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False,
                                  timeout=max(1, self.left()))
        except subprocess.TimeoutExpired:
            return self.skip(fit, "ran out of time")
        if done.returncode != 0 and len(fit) > 1:
            for cell in fit:  # one budget may be too small for what is forced
                self.run([cell])
            return
        if done.returncode != 0:
            return self.skip(fit, (done.stderr.strip().splitlines() or ["failed"])[-1])
        command = "sluice " + " ".join(words[1:]).replace(self.args.models_folder + "/", "")
        rows = json.loads(done.stdout)["rows"]  # budget by budget, as many for each
        for index, row in enumerate(rows):
            self.add(fit[index * len(fit) // len(rows)], dict(row, command=command))
        self.done.update(cell.key() for cell in fit)
        self.save()
        taken = time.monotonic() - start
        self.took[fit[0].model, fit[0].context, fit[0].batch] = taken / len(fit)
        print(f"{fit[0]} and {len(fit) - 1} other budgets: {taken:.1f} s", flush=True)


def chosen(cell, args):
    return ((not args.models or cell.model in args.models.split(",")) and
            (not args.contexts or str(cell.context) in args.contexts.split(",")) and
            (not args.budgets or str(cell.budget_mib) in args.budgets.split(",")))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", required=True, help="folder of the programs")
    parser.add_argument("--out", required=True, help="JSON file to go on with")
    parser.add_argument("--time", type=float, default=86400, help="seconds to use at most")
    parser.add_argument("--models-folder", default="/dev/shm", help="folder of synthetic models")
    parser.add_argument("--experiments", default=",".join(ex.EXPERIMENTS))
    parser.add_argument("--models", default="", help="only these, as in minitron8b-F16,qwen30b-Q4_0")
    parser.add_argument("--contexts", default="", help="only these, as in 1024,4096")
    parser.add_argument("--budgets", default="", help="only these, in MiB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--generate", type=int, default=48, help="tokens; the paper's were 54 to 127")
    parser.add_argument("--shrink", type=int, default=1, help="divide prompts, for trying the script")
    parser.add_argument("--tiny", help="options of synth in place of the shapes, for trying it")
    runner = Runner(parser.parse_args())
    os.makedirs(runner.args.models_folder, exist_ok=True)
    seen, groups = set(), {}
    for experiment in runner.args.experiments.split(","):
        for cell in ex.cells(experiment):
            if cell.key() not in seen and chosen(cell, runner.args):
                seen.add(cell.key())
                groups.setdefault((cell.model, cell.context, cell.batch, cell.strategy),
                                  []).append(cell)
    for group in groups.values():
        runner.run(group)
    print(f"{len(seen & runner.done)} of {len(seen)} cells are there, {len(runner.skipped)} left out")
    reasons = {}
    for line in runner.skipped:
        reasons.setdefault(line.split(": ", 1)[1], []).append(line)
    for reason, lines in reasons.items():
        print(f"  {len(lines)}: {reason} ({lines[0].split(': ', 1)[0]}, ...)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
