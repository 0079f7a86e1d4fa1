# SPDX-License-Identifier: Apache-2.0
"""What the paper measured, as cells to measure here: see run.py and report.py.

A cell is one context of one model under one budget, for one batch, with one strategy. Its figures
are the time to the first token of a prompt that fills the context, and the speed of generation
behind it.
"""
import json
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "paper"
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))

# What gains are measured against: everything static, nothing streamed. (The paper's are over layer
# offload of llama.cpp; see the report.)
STATIC = "ffn-host"
BATCH_CONTEXT = 1024


class Model:
    def __init__(self, shape, kind, gib):
        self.shape, self.kind, self.gib = shape, kind, gib
        self.name = f"{shape}-{kind}"


MODELS = [Model("minitron4b", "F16", 8.4), Model("minitron8b", "F16", 15.7),
          Model("qwen30b", "Q4_0", 16.1), Model("qwen235b", "Q2_K", 72.0)]


class Cell:
    def __init__(self, model, context, budget_mib, batch=1, strategy="auto"):
        self.model, self.context, self.budget_mib = model, context, budget_mib
        self.batch, self.strategy = batch, strategy

    def key(self):
        return (self.model, self.context, self.budget_mib, self.batch, self.strategy)

    def __str__(self):
        return (f"{self.model} {self.context // 1024}K {self.budget_mib} MiB batch {self.batch} "
                f"{self.strategy}")


def grid(experiment):
    """(model, context, budget) of a published table, contexts from short to long."""
    table = PUBLISHED[experiment]
    for context in ("1024", "4096", "16384", "65536"):
        for model in MODELS:
            for budget in table["budgets_mib"]:
                if context in table.get(model.name, {}):
                    yield model.name, int(context), budget


def cells(experiment):
    if experiment == "table4":
        return [Cell(*point) for point in grid("table4")]
    if experiment == "figure2":
        return [Cell(*point, strategy=strategy) for point in grid("figure2")
                for strategy in ("auto", STATIC)]
    table = PUBLISHED[experiment]
    strategies = ("auto",) if experiment == "table9" else ("auto", STATIC)
    return [Cell(model, BATCH_CONTEXT, int(budget), batch, strategy)
            for model, budgets in table.items() if model != "batches"
            for budget in budgets for batch in table["batches"] for strategy in strategies]


EXPERIMENTS = ("table4", "figure2", "table9", "figure7")


def expected_seconds(cell, repeats, generated):
    """A guess from the published figures; what is measured replaces it."""
    table = PUBLISHED["table4"]
    of_context = table.get(cell.model, {}).get(str(cell.context))
    if not of_context:
        return 20.0
    ttft, tps = max(of_context["ttft_s"]), min(of_context["tps"])
    return 4 + max(cell.batch, repeats + 0.3) * ttft + (repeats + 0.3) * generated / tps


def row_key(row):
    """Of a row of a result: the key of its cell."""
    return (row["model"], row["context"], row["budget_mib"], row["batch"], row["strategy"])


def load_rows(folder=RESULTS):
    """All rows of all files, of one cell and metric the newest."""
    kept = {}
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8")):
            kept[(*row_key(row), row["metric"])] = row
    return list(kept.values())
