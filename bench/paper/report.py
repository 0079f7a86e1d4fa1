#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make docs/paper.md and docs/paper/*.svg from bench/results/paper/*.json and the published values.

    bench/paper/report.py [--results FOLDER] [--docs FOLDER] [--check]
"""
import argparse
import math
import pathlib
import sys

import experiments as ex

DOCS = ex.HERE.parent.parent / "docs"
COLORS = ["#1f5fa8", "#c8641e", "#3f8f4a", "#8a4fa0"]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 62, 138, 40, 46

INTRO = """# The paper's matrix

Written by `bench/paper/report.py` from the files in `bench/results/paper`; do not edit.

The figures of arXiv 2604.26334, measured here on models of random weights in the same shapes, beside
what was published. The machines differ: published are those of a desktop PC with an RTX 5090, so that
budgets and orders can be compared, not single figures. A cell is `here / published`; a dash is
what has not been measured. A budget is all that Sluice takes of VRAM but for the driver's own context.

To measure more: `bench/paper/run.py`, which goes on where it ended, then `bench/paper/report.py`.
"""


def number(value):
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def context_text(context):
    return f"{context // 1024}K"


def budget_text(mib):
    return f"{mib / 1024:g} GiB"


def pair(here, published):
    return f"{number(here)} / {number(published)}"


def table(header, lines):
    rows = [header, ["---"] * 2 + ["---:"] * (len(header) - 2)] + lines
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


class Values:
    """Figures by cell and metric."""
    def __init__(self, rows):
        self.of = {(*ex.row_key(row), row["metric"]): row["value"] for row in rows}

    def get(self, model, context, budget, metric, batch=1, strategy="auto"):
        return self.of.get((model, context, budget, batch, strategy, metric))

    def gain(self, model, context, budget, metric, batch=1):
        """Of the plan over the static one; times are the shorter the better."""
        best = self.get(model, context, budget, metric, batch)
        static = self.get(model, context, budget, metric, batch, ex.STATIC)
        if not best or not static:
            return None
        return static / best if metric == "ttft_s" else best / static


# ---- figures ----

def text(x, y, words, anchor="middle", size=11, color="#222"):
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}">{words}</text>\n')


def polyline(points, color, dashed):
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    svg = f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dash}/>\n'
    for x, y in points:
        svg += (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" stroke="{color}" stroke-width="1.5" '
                f'fill="{"#fff" if dashed else color}"/>\n')
    return svg


def ticks(low, high):
    """1, 2 and 5 times powers of ten between two logarithms."""
    for exponent in range(math.floor(low), math.ceil(high) + 1):
        for digit in (1, 2, 5):
            value = digit * 10.0 ** exponent
            if low - 1e-9 <= math.log10(value) <= high + 1e-9:
                yield value


def figure(title, x_names, x_title, series):
    """series: (label, here, published), lists as long as x_names with None where nothing is."""
    values = [v for _, here, published in series for v in here + published if v]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05
    if high - low < 0.35:  # so that an axis has at least a tick
        low, high = low - 0.15, high + 0.15
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(index, value):
        return (LEFT + width * (index + 0.5) / len(x_names),
                TOP + height * (high - math.log10(value)) / (high - low))

    svg = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
           'font-family="sans-serif">\n<rect width="100%" height="100%" fill="#fff"/>\n')
    svg += text(LEFT, 22, title, "start", 13)
    for value in ticks(low, high):
        y = at(0, value)[1]
        svg += f'<line x1="{LEFT}" x2="{LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>\n'
        svg += text(LEFT - 7, y + 4, f"{value:g}", "end", color="#555")
    for index, name in enumerate(x_names):
        svg += text(at(index, 10 ** low)[0], HEIGHT - BOTTOM + 17, name)
    svg += text(LEFT + width / 2, HEIGHT - 8, x_title, color="#555")
    for index, (label, here, published) in enumerate(series):
        color = COLORS[index % len(COLORS)]
        for values, dashed in ((published, True), (here, False)):
            points = [at(i, v) for i, v in enumerate(values) if v]
            if points:
                svg += polyline(points, color, dashed)
        y = TOP + 8 + 18 * index
        svg += polyline([(WIDTH - RIGHT + 12, y), (WIDTH - RIGHT + 34, y)], color, False)
        svg += text(WIDTH - RIGHT + 42, y + 4, label, "start")
    y = TOP + 8 + 18 * len(series)
    svg += polyline([(WIDTH - RIGHT + 12, y), (WIDTH - RIGHT + 34, y)], "#777", True)
    return svg + text(WIDTH - RIGHT + 42, y + 4, "published", "start") + "</svg>\n"


# ---- the four experiments ----

class Report:
    def __init__(self, rows):
        self.values = Values(rows)
        self.rows = rows
        self.page = INTRO
        self.files = {}

    def draw(self, name, title, x_names, x_title, series):
        if any(v for _, here, _ in series for v in here):
            self.files[name] = figure(title, x_names, x_title, series)
            self.page += f"\n![{title}](paper/{name})\n"

    def by_context(self, experiment, metrics):
        """A table over budgets for each metric, and a figure for each model and metric."""
        published = ex.PUBLISHED[experiment]
        budgets = published["budgets_mib"]
        for column, name, get in metrics:
            lines, figures = [], []
            for model in ex.MODELS:
                series = []
                for context, columns in published.get(model.name, {}).items():
                    here = [get(model.name, int(context), b) for b in budgets]
                    series.append((context_text(int(context)), here, columns[column]))
                    if any(here):
                        lines.append([model.name, context_text(int(context))] +
                                     [pair(a, b) for a, b in zip(here, columns[column])])
                figures.append((f"{experiment}-{column.replace('_', '-')}-{model.name.lower()}.svg",
                                f"{model.name}: {name}", series))
            self.page += f"\n{name[0].upper() + name[1:]}:\n\n" if lines else ""
            self.page += table(["model", "context"] + [budget_text(b) for b in budgets],
                               lines) if lines else f"\n{name}: not measured yet.\n"
            for file, title, series in figures:
                self.draw(file, title, [budget_text(b) for b in budgets], "VRAM budget", series)

    def by_batch(self, experiment, name, get):
        published = ex.PUBLISHED[experiment]
        batches = published["batches"]
        lines, series = [], []
        for model, budgets in published.items():
            for budget, values in budgets.items() if model != "batches" else ():
                here = [get(model, ex.BATCH_CONTEXT, int(budget), b) for b in batches]
                series.append((budget_text(int(budget)), here, values))
                lines.append([model, budget_text(int(budget))] +
                             [pair(a, b) for a, b in zip(here, values)])
        self.page += "\n" + table(["model", "budget"] + [f"batch {b}" for b in batches], lines)
        self.draw(f"{experiment}.svg", name, [str(b) for b in batches], "sequences", series)

    def make(self):
        v = self.values
        machines = sorted({row["machine"] for row in self.rows})
        commits = sorted({row["commit"] for row in self.rows if row.get("commit")})
        self.page += ("\nMeasured on " + "; ".join(machines) + ", at commits " + ", ".join(commits)
                      + ".\n") if self.rows else "\nNothing has been measured yet.\n"
        self.page += "\n## Table 4: speed over budget and context\n"
        self.by_context("table4", [
            ("tps", "generated tokens/s", lambda m, c, b: v.get(m, c, b, "decode_tps")),
            ("ttft_s", "seconds to the first token", lambda m, c, b: v.get(m, c, b, "ttft_s"))])
        self.page += ("\n## Figure 2: gains\n\nPublished: over layer offload of llama.cpp. Here: over "
                      f"the same engine with everything static (`--strategy {ex.STATIC}`: attention, then "
                      "what fits, in VRAM; the rest on the CPU), which takes the kernels out of the "
                      "comparison.\n")
        self.by_context("figure2", [
            ("tps_gain", "gain in generated tokens/s", lambda m, c, b: v.gain(m, c, b, "decode_tps")),
            ("ttft_gain", "gain in time to the first token", lambda m, c, b: v.gain(m, c, b, "ttft_s"))])
        self.page += "\n## Table 9: tokens/s of all sequences, by batch\n"
        self.by_batch("table9", "tokens/s of all sequences together",
                      lambda m, c, b, n: v.get(m, c, b, "decode_tps", n))
        self.page += "\n## Figure 7: gains by batch\n"
        self.by_batch("figure7", "gain over everything static",
                      lambda m, c, b, n: v.gain(m, c, b, "decode_tps", n))
        return self


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", default=ex.RESULTS, type=pathlib.Path)
    parser.add_argument("--docs", default=DOCS, type=pathlib.Path)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    report = Report(ex.load_rows(args.results)).make()
    wanted = {args.docs / "paper" / name: svg for name, svg in report.files.items()}
    wanted[args.docs / "paper.md"] = report.page
    stale = [p for p, words in wanted.items()
             if not p.exists() or p.read_text(encoding="utf-8") != words]
    stale += [p for p in (args.docs / "paper").glob("*.svg") if p not in wanted]
    for path in stale:
        if args.check:
            print(f"{path} is not up to date; run bench/paper/report.py", file=sys.stderr)
        elif path in wanted:
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()
    print(f"paper: {len(report.rows)} rows, {len(stale)} files {'stale' if args.check else 'written'}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
