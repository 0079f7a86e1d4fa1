#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the tables and figures of measured speeds from bench/results/*.json, and from nothing else.

    tools/results_table.py            write docs/performance.md, docs/figures/*.svg and the table
                                      between the marks of README.md
    tools/results_table.py --check    write nothing; fail when they are not up to date

A file is an array of rows, or an object with such an array as "rows" (what `sluice bench --json`
prints). Of rows that measure the same thing the newest counts.
"""
import argparse
import json
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "performance.md"
FIGURES = ROOT / "docs" / "figures"
README = ROOT / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

REQUIRED = ("date", "device", "model", "metric", "value")
NO_MACHINE = "Machine not recorded"
NUMBERS = ("value", "spread", "predicted", "limit_fraction", "peak_vram_mib", "peer_value",
           "peer_ratio", "budget_mib", "prompt_tokens", "generated_tokens", "depth", "batch", "threads", "runs")
SPEEDS = ("prefill_tps", "decode_tps")
NAMES = {"kl": "mean KL divergence from the run on the CPU",
         "copy_rate": "copies to VRAM while a whole model is streamed",
         "kl_exact": "mean KL divergence from a run without rounding of activations"}

INTRO = """# Performance

Written by `tools/results_table.py` from the files in `bench/results`; do not edit. Every figure
here is a row of those files, with its date, commit, machine and command.

| column | meaning |
| --- | --- |
| budget | VRAM that Sluice may use, without the driver's own context; all: no limit given |
| tokens/s | median over the runs of a row |
| spread | (slowest - fastest) / median |
| predicted | what the planner said beforehand, from the profile of the machine |
| of the limit | share of the speed that no schedule could pass with the same bytes outside VRAM (`docs/design.md`, \"The limit\"). More than 100 % means that the profile took the machine for slower than it is, or that weights stayed in the CPU's cache |
| peak VRAM | bytes of the one arena, in MiB: the most that was in use |
| peer | the same measurement with another program; its name is in the table |

Models named after a shape and a type (`llama8b-Q4_K`) hold random weights in the shape of the real
model (`sluice synth`): speed does not depend on the values.

To measure again: `sluice bench -m MODEL --vram 2G,4G,8G,auto -p 1024 -n 64 --json`, all of it on a
GPU machine with `bench/gpu_run.py`, or on a CPU beside a peer with `bench/cpu_peer.py`; then run
this script.
"""


class BadResult(Exception):
    pass


def load_rows():
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise BadResult(f"{path.name}: {problem}") from None
        if isinstance(data, dict):
            data = data.get("rows")
        if not isinstance(data, list):
            raise BadResult(f"{path.name}: neither an array of rows nor an object with \"rows\"")
        for index, row in enumerate(data):
            check_row(row, f"{path.name}, row {index}")
            rows.append(dict(row, machine=row.get("machine") or NO_MACHINE))
    return newest(rows)


def check_row(row, where):
    if not isinstance(row, dict):
        raise BadResult(f"{where}: not an object")
    for name in REQUIRED:
        if row.get(name) in (None, ""):
            raise BadResult(f"{where}: {name} is missing")
        if name != "value" and not isinstance(row[name], str):
            raise BadResult(f"{where}: {name} is no text")
    for name in NUMBERS:
        value = row.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))
                                  or not math.isfinite(value)):
            raise BadResult(f"{where}: {name} is no number")


def newest(rows):
    """Of rows that measure the same thing, the last: by date, then by the order of the files."""
    kept = {}
    for row in sorted(rows, key=lambda r: r["date"]):
        key = tuple(row.get(name) for name in (
            "machine", "device", "model", "type", "metric", "budget_mib", "prompt_tokens",
            "generated_tokens", "depth", "batch", "threads", "unit", "strategy"))
        kept[key] = row
    return list(kept.values())


# ---- text ----

def budget_order(row):
    budget = row.get("budget_mib")
    return math.inf if budget is None else budget


def budget_text(mib):
    if mib is None:
        return "all"
    return f"{round(mib / 1024, 2):g} GiB" if mib >= 1024 else f"{mib:g} MiB"


def number(value):
    """Three significant digits, or all of a whole part that has more."""
    if value is None:
        return ""
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def percent(value):
    return "" if value is None else f"{100 * value:.0f} %"


def batch(row):
    return row.get("batch") or 1


def tokens_text(row):
    text = (f"prompt of {row.get('prompt_tokens') or 0}" if row["metric"] == "prefill_tps"
            else "generation" if batch(row) == 1 else f"{batch(row)} generations together")
    depth, threads = row.get("depth") or 0, row.get("threads") or 0
    text += f" at depth {depth}" if depth else ""
    if row["device"] == "cpu" and threads:
        text += f", {threads} thread" + ("s" if threads > 1 else "")
    return text


def table(header, aligns, lines):
    text = "| " + " | ".join(header) + " |\n"
    text += "| " + " | ".join(aligns) + " |\n"
    for line in lines:
        text += "| " + " | ".join(line) + " |\n"
    return text


def peer_text(row):
    if row.get("peer_value") is None:
        return ""
    name = f" ({row['peer']})" if row.get("peer") else ""
    return number(row["peer_value"]) + name


def times_text(row):
    peer = row.get("peer_value")
    ratio = row.get("peer_ratio") or (row["value"] / peer if peer else None)
    return f"{ratio:.2f}" if ratio else ""


def speed_order(row):
    return (row["metric"] != "decode_tps", row.get("depth") or 0, row.get("prompt_tokens") or 0,
            batch(row), row.get("threads") or 0, budget_order(row))


def speed_table(rows):
    lines = []
    for row in sorted(rows, key=speed_order):
        spread = row.get("spread")
        lines.append([tokens_text(row), budget_text(row.get("budget_mib")), number(row["value"]),
                      "" if spread is None else f"{100 * spread:.1f} %",
                      number(row.get("predicted")), percent(row.get("limit_fraction")),
                      number(row.get("peak_vram_mib")), peer_text(row), times_text(row)])
    return table(["test", "budget", "tokens/s", "spread", "predicted", "of the limit", "peak VRAM",
                  "peer", "times the peer"], ["---"] + ["---:"] * 8, lines)


def strategy_table(rows):
    """Forced strategies beside the searched plan: a line for each, tests and budgets across."""
    tests = sorted({(r["metric"] != "decode_tps", tokens_text(r), budget_order(r)) for r in rows})
    cells = {(r["strategy"], tokens_text(r), budget_order(r)): r for r in rows}
    lines = []
    for name in sorted({r["strategy"] for r in rows}, key=lambda n: (n == "auto", n)):
        line = [name]
        for _, test, budget in tests:
            row = cells.get((name, test, budget))
            best = max(r["value"] for r in rows
                       if tokens_text(r) == test and budget_order(r) == budget)
            text = number(row["value"]) if row else ""
            line.append(f"**{text}**" if row and row["value"] == best else text)
        lines.append(line)
    header = [f"{test}, {budget_text(None if budget == math.inf else budget)}"
              for _, test, budget in tests]
    return ("Strategies forced (`--strategy`) beside the plan that is searched (`auto`), tokens/s:\n\n"
            + table(["strategy"] + header, ["---"] + ["---:"] * len(header), lines))


def other_name(row):
    name = NAMES.get(row["metric"], row["metric"])
    if row["metric"] == "copy_rate":
        return f"{name}, prompt of {row['prompt_tokens']} (copy engine busy {percent(row['limit_fraction'])})"
    if row["metric"] == "random_plans":
        what = tokens_text(dict(row, metric=row["of"]))
        return f"fastest of {row['random_plans']} plans at random, {what}"
    return name + (f", passes of {row['batch']}" if batch(row) > 1 or "exact" in row["metric"] else "")


def other_table(rows):
    lines = []
    for row in sorted(rows, key=lambda r: (r["metric"], batch(r), budget_order(r))):
        lines.append([other_name(row), budget_text(row.get("budget_mib")),
                      number(row["value"]), row.get("unit") or "", number(row.get("peak_vram_mib")), peer_text(row)])
    return table(["figure", "budget", "value", "unit", "peak VRAM", "peer"],
                 ["---", "---:", "---:", "---", "---:", "---:"], lines)


def beside_peer(row):
    return row["device"] == "cpu" and row.get("peer_spread") is not None


def peer_table(rows):
    """Runs on a CPU in turns with a peer: a line for a model and a number of threads."""
    cells = {}
    for row in rows:
        cells.setdefault((row["model"], row.get("threads") or 0), {})[row["metric"]] = row
    lines = []
    for (model, threads), found in sorted(cells.items()):
        line = [model, str(threads)]
        for metric in SPEEDS[::-1]:
            row = found.get(metric)
            line += [number(row["value"]), number(row["peer_value"]), times_text(row),
                     f"{100 * row['spread']:.0f} %, {100 * row['peer_spread']:.0f} %"] if row \
                else [""] * 4
        lines.append(line)
    return table(["model", "threads", "generation", "peer", "times", "spreads", "prompt of 512", "peer",
                  "times", "spreads"], ["---"] + ["---:"] * 9, lines)


def peer_section(rows):
    peers = ", ".join(sorted({r["peer"] for r in rows}))
    commits = "; ".join(sorted({f"{r['date']}, commit {r.get('commit')}" for r in rows}))
    return (f"\n### Beside {peers}\n\nTokens/s, in turns on the same files (`bench/cpu_peer.py`; {commits}). Times is the median "
            "of the turns' ratios, in older rows the ratio of the medians.\n\n"
            + peer_table(rows))


def provenance(rows):
    lines = sorted({(r["date"], r.get("commit") or "", r.get("threads"), r.get("command") or "")
                    for r in rows}, key=str)
    text = "Measured by:\n\n"
    for date, commit, threads, command in lines:
        where = [date] + ([f"commit {commit}"] if commit else [])
        where += [f"{threads} thread" + "s" * (threads > 1)] if threads else []
        text += f"- {', '.join(where)}" + (f": `{command}`" if command else "") + "\n"
    return text


# ---- figures ----

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 40, 44
OURS, PREDICTED, PEER = "#1f5fa8", "#8fb4dc", "#c06014"
SHADES = ("#8fb4dc", "#1f5fa8", "#2a8a57", "#c06014", "#7a3fa0")


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def text_at(x, y, text, anchor="middle", size=12, color="#222"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}">{escape(text)}</text>\n')


def curve(points, color, filled):
    svg = ""
    if len(points) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        dash = "" if filled else ' stroke-dasharray="5 4"'
        svg += f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>\n'
    for x, y, _ in points:
        fill = color if filled else "#fff"
        svg += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{color}" ' \
               'stroke-width="2"/>\n'
    return svg


def plot(title, x_label, ticks, series):
    """Speeds on a logarithmic axis. `ticks`: texts along the other one; `series`: (label, color,
    filled, labelled, [(index of the tick, value)])."""
    values = [value for *_, points in series for _, value in points]
    low, high = math.log10(min(values)), math.log10(max(values))
    low, high = math.floor(low * 2) / 2, max(math.ceil(high * 2) / 2, math.floor(low * 2) / 2 + 0.5)
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x_of(index):
        return LEFT + plot_width * (index + 0.5) / len(ticks)

    def y_of(value):
        return TOP + plot_height * (high - math.log10(value)) / (high - low)

    svg = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
           'font-family="sans-serif">\n<rect width="100%" height="100%" fill="#fff"/>\n')
    svg += text_at(LEFT, 22, title, "start", 14)
    for exponent in range(math.floor(low), math.ceil(high) + 1):
        for digit in (1, 2, 5):
            value = digit * 10.0 ** exponent
            if low - 1e-9 <= math.log10(value) <= high + 1e-9:
                y = y_of(value)
                svg += (f'<line x1="{LEFT}" x2="{LEFT + plot_width}" y1="{y:.1f}" y2="{y:.1f}" '
                        'stroke="#ddd"/>\n')
                svg += text_at(LEFT - 8, y + 4, f"{value:g}", "end", 11, "#555")
    for index, text in enumerate(ticks):
        svg += text_at(x_of(index), HEIGHT - BOTTOM + 20, text)
    svg += text_at(LEFT + plot_width / 2, HEIGHT - 6, x_label, size=11, color="#555")
    for line, (label, color, filled, labelled, points) in enumerate(series):
        svg += curve([(x_of(i), y_of(value), value) for i, value in points], color, filled)
        for i, value in points if labelled else []:
            svg += text_at(x_of(i), y_of(value) + labelled, number(value), size=11, color=color)
        y = TOP + 20 * line + 6
        svg += curve([(WIDTH - RIGHT + 14, y, 0)], color, filled)
        svg += text_at(WIDTH - RIGHT + 26, y + 4, label, "start")
    return svg + "</svg>\n"


def budget_figure(title, rows):
    """Speed over the budget: measured, predicted, peer."""
    rows = sorted(rows, key=budget_order)
    budgets = sorted({budget_order(r) for r in rows})
    peers = ", ".join(sorted({r.get("peer") or "peer" for r in rows if r.get("peer_value")}))
    series = []
    for label, name, color, filled, labelled in (
            ("Sluice", "value", OURS, True, -9), ("predicted", "predicted", PREDICTED, False, 0),
            (peers, "peer_value", PEER, True, 18)):
        points = [(budgets.index(budget_order(r)), r[name]) for r in rows if r.get(name)]
        if points:
            series.append((label, color, filled, labelled, points))
    ticks = [budget_text(None if b == math.inf else b) for b in budgets]
    return plot(title, "VRAM budget", ticks, series)


def depth_figure(title, rows):
    """Speed over depth, a curve for each budget."""
    depths = sorted({r["depth"] for r in rows})
    budgets = sorted({budget_order(r) for r in rows})
    series = []
    for index, budget in enumerate(budgets):
        points = [(depths.index(r["depth"]), r["value"])
                  for r in sorted(rows, key=lambda r: r["depth"]) if budget_order(r) == budget]
        text = budget_text(None if budget == math.inf else budget)
        series.append((text, SHADES[index % len(SHADES)], True, -9, points))
    return plot(title, "tokens in the cache", [f"{d:,}" for d in depths], series)


def slug(text):
    return "".join(c.lower() if c.isalnum() else "-" for c in text).strip("-")


def figures_of(model, rows, stem):
    """Every test of a model at two budgets or more, and generation at two depths or more: (file
    name, title, svg)."""
    tests, deep = {}, {}
    for row in rows:
        tests.setdefault((row["metric"], row.get("prompt_tokens") or 0, row.get("depth") or 0,
                          batch(row)), []).append(row)
        if row["metric"] == "decode_tps" and row.get("depth") and batch(row) == 1:
            deep.setdefault(budget_order(row), []).append(row)
    out = []
    for key in sorted(tests):
        group = tests[key]
        if len({budget_order(r) for r in group}) >= 2 and all(r["value"] > 0 for r in group):
            title = f"{model}, {tokens_text(group[0])}: tokens/s over the VRAM budget"
            out.append((f"{stem}-{slug(tokens_text(group[0]))}.svg", title,
                        budget_figure(title, group)))
    group = [r for rows in deep.values() if len({r["depth"] for r in rows}) >= 2 for r in rows]
    if group:
        title = f"{model}: tokens/s of generation over the depth"
        out.append((f"{stem}-over-depth.svg", title, depth_figure(title, group)))
    return out


# ---- pages ----

def grouped(rows, name):
    out = {}
    for row in rows:
        out.setdefault(row[name], []).append(row)
    return sorted(out.items())


def performance_page(rows):
    text, files = INTRO, {}
    if not rows:
        return text + "\nNothing has been measured yet.\n", files
    machines = grouped(rows, "machine")
    for machine, on_machine in machines:
        text += f"\n## {machine}\n"
        in_turns = [r for r in on_machine if beside_peer(r)]
        text += peer_section(in_turns) if in_turns else ""
        on_machine = [r for r in on_machine if not beside_peer(r)]
        for model, of_model in grouped(on_machine, "model"):
            text += f"\n### {model}\n\n"
            forced = [r for r in of_model if r.get("strategy")]
            speeds = [r for r in of_model if r["metric"] in SPEEDS and not r.get("strategy")]
            others = [r for r in of_model if r["metric"] not in SPEEDS]
            shared = sum(any(r["model"] == model for r in other) for _, other in machines) > 1
            stem = slug(model) + (f"-{slug(machine.split(' + ')[-1])}" if shared else "")
            if speeds:
                text += speed_table(speeds) + "\n"
                for name, title, svg in figures_of(model, speeds, stem):
                    files[name] = svg
                    text += f"![{title}](figures/{name})\n\n"
            if forced:
                text += strategy_table(forced) + "\n"
            if others:
                text += other_table(others) + "\n"
            text += provenance(of_model)
    return text, files


def readme_table(rows):
    """Real GPUs only: generation, and the prompt length with most rows, by model and budget."""
    rows = [r for r in rows if r["device"] == "cuda" and r["metric"] in SPEEDS
            and r["machine"] != NO_MACHINE and not r.get("depth") and batch(r) == 1
            and not r.get("strategy")]
    if not rows:
        return "Nothing has been measured yet.\n"
    text = ""
    for machine, on_machine in grouped(rows, "machine"):
        lines, tested = [], []
        for model, of_model in grouped(on_machine, "model"):
            prompts = [r for r in of_model if r["metric"] == "prefill_tps"]
            lengths = {}
            for row in prompts:
                lengths.setdefault(row["prompt_tokens"], []).append(row)
            prompt = max(lengths, default=None, key=lambda n: (
                len(lengths[n]), sum("peer_value" in r for r in lengths[n]), n))
            for budget in sorted({budget_order(r) for r in of_model}):
                decode = [r for r in of_model
                          if budget_order(r) == budget and r["metric"] == "decode_tps"]
                prefill = [r for r in prompts
                           if budget_order(r) == budget and r["prompt_tokens"] == prompt]
                if not decode and not prefill:
                    continue
                line = [model, budget_text(None if budget == math.inf else budget)]
                peaks = [r["peak_vram_mib"] for r in decode + prefill if r.get("peak_vram_mib")]
                line.append(number(max(peaks)) if peaks else "")
                for found in (decode, prefill):
                    row = found[-1] if found else None
                    line.append(number(row["value"]) if row else "")
                    line.append(number(row.get("peer_value")) if row else "")
                lines.append(line)
            if prompt:
                tested.append(f"{prompt} ({model})")
        peers = ", ".join(sorted({r["peer"] for r in on_machine if r.get("peer")}))
        text += f"On {machine}, tokens/s (medians), at the start of a context"
        text += (f"; tokens of the prompt: {', '.join(tested)}" if tested else "")
        text += (f"; peer: {peers}" if peers else "") + ".\n\n"
        text += table(["model", "budget", "peak VRAM, MiB", "generation", "peer", "prompt", "peer"],
                      ["---"] + ["---:"] * 6, lines) + "\n"
    return text + ("All figures, with commits, commands and spreads: "
                   "[docs/performance.md](docs/performance.md).\n")


def with_marks(text, inside):
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BadResult(f"README.md lacks the marks {BEGIN} and {END}")
    return f"{before}{begin}\n{inside.rstrip()}\n{end}{after}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    try:
        rows = load_rows()
        page, figures = performance_page(rows)
        wanted = {FIGURES / name: svg for name, svg in figures.items()}
        wanted[PAGE] = page
        wanted[README] = with_marks(README.read_text(encoding="utf-8"), readme_table(rows))
    except BadResult as problem:
        print(f"results: {problem}", file=sys.stderr)
        return 1
    stale = [p for p, text in wanted.items()
             if not p.exists() or p.read_text(encoding="utf-8") != text]
    stale += [p for p in FIGURES.glob("*.svg") if p not in wanted]
    if args.check:
        for path in stale:
            print(f"results: {path.relative_to(ROOT)} is not up to date; run "
                  "tools/results_table.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        if path in wanted:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()
    print(f"results: {len(rows)} rows, {len(stale)} files written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
