#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw one pass of a trace (`sluice run --trace`, `sluice bench --trace`) as a picture, measured and,
when the pass was full, predicted.

    tools/trace_svg.py TRACE.json[.gz] PASS OUT.svg      PASS: its number, or -1 for the last

Lanes and colours are those of `sluice plan --svg`.
"""
import gzip
import json
import sys

WIDTH, LEFT, RIGHT, TOP, LANE = 1200, 96, 16, 46, 15
LANES = ["pass", "driver", "CPU", "GPU", "copy up", "copy down"]
COLORS = ["#d9d9d9", "#9a9a9a", "#6f9a3e", "#2f6db3", "#e28a1f", "#7f5aa6"]


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;")


def events_of(path, number):
    """Of one pass: what was measured, and what was predicted."""
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as file:
        events = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
    if number < 0:
        number += max(e["args"]["pass"] for e in events) + 1
    events = sorted((e for e in events if e["args"]["pass"] == number), key=lambda e: e["ts"])
    return [e for e in events if e["pid"] == 1], [e for e in events if e["pid"] == 2]


def tick_of(length):
    tick = 1.0
    for step in (2, 2.5, 2) * 20:
        if length / tick <= 12:
            break
        tick *= step
    return tick


def draw_lanes(events, y, start, scale, title):
    svg = f'<text x="{LEFT}" y="{y - 6}">{title}</text>\n'
    for lane, name in enumerate(LANES):
        at = y + (LANE + 2) * lane
        svg += (f'<text x="{LEFT - 6}" y="{at + 11}" text-anchor="end">{name}</text>\n'
                f'<rect x="{LEFT}" y="{at}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}" '
                'fill="#f2f2f2"/>\n')
    for e in events:
        x = LEFT + max(0.0, e["ts"] - start) * scale
        at = y + (LANE + 2) * e["tid"]
        moved = f', {e["args"]["bytes"] / 2**20:.2f} MiB' if "bytes" in e["args"] else ""
        width = max(0.15, e["dur"] * scale)
        svg += (f'<rect x="{x:.2f}" y="{at}" width="{width - (0.3 if width > 1 else 0):.2f}" '
                f'height="{LANE}" fill="{COLORS[e["tid"]]}"><title>{escape(e["name"])}: '
                f'{e["dur"] / 1e3:.3f} ms{moved}</title></rect>\n')
        # A name where it fits, at six pixels a letter.
        if 0 < e["tid"] and 6 * len(e["name"]) + 6 < width:
            svg += (f'<text x="{x + width / 2:.1f}" y="{at + 11}" text-anchor="middle" '
                    f'fill="#fff">{escape(e["name"])}</text>\n')
    return svg


def draw(measured, predicted):
    wholes = [next(e for e in events if e["tid"] == 0) for events in (measured, predicted) if events]
    start, args = wholes[0]["ts"], wholes[0]["args"]
    length = max(w["dur"] for w in wholes)
    scale = (WIDTH - LEFT - RIGHT) / length
    block = (LANE + 2) * len(LANES) + 26
    height = TOP + block * len(wholes) + 6
    svg = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
           f'height="{height}" font-family="sans-serif" font-size="10.5">\n'
           '<rect width="100%" height="100%" fill="#ffffff"/>\n'
           f'<text x="{LEFT}" y="18">A pass of {args["tokens"]} token{"s" if args["tokens"] > 1 else ""} '
           f'behind {args["depth"]} others</text>\n')
    for i, (events, name) in enumerate(((measured, "measured"), (predicted, "predicted"))):
        if events:
            svg += draw_lanes(events, TOP + block * i, start, scale,
                              f'{name}: {wholes[i]["dur"] / 1e3:.2f} ms')
    y = TOP + block * len(wholes) - 24
    tick = tick_of(length)
    for i in range(int(length / tick) + 1):
        x = LEFT + i * tick * scale
        svg += (f'<path d="M{x:.1f} {y}v4" stroke="#666" stroke-width="0.7" fill="none"/>\n'
                f'<text x="{x:.1f}" y="{y + 15}" text-anchor="middle">{i * tick / 1e3:g}</text>\n')
    return svg + f'<text x="{LEFT - 6}" y="{y + 15}" text-anchor="end">ms</text>\n</svg>\n'


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    measured, predicted = events_of(sys.argv[1], int(sys.argv[2]))
    with open(sys.argv[3], "w", encoding="utf-8") as out:
        out.write(draw(measured, predicted))


if __name__ == "__main__":
    main()
