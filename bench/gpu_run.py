#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One measuring session on a GPU machine: checks first, then benchmarks, results as JSON rows.

    bench/gpu_run.py --bin DIR --out FILE.json --tmp /dev/shm JOB...

JOB: checks | dense | mixture | skew | context | parallel | depth | copies | strategies |
     random_plans | accuracy | cpu | products | operators | FILE.gguf (a real model: KL to the CPU
     and perplexity).
Every job's rows go into FILE.json (bench/results), beside the figures of peers where there are any;
those of products and operators into files of these names beside it (bench/results/kernels).
Only the standard library is needed.
"""
import argparse
import datetime
import json
import os
import subprocess
import sys

# llama.cpp of August 2026 on the same kind of machine, everything in VRAM or layer offload
# (tokens/s): (model, budget in MiB or None, metric, prompt tokens, depth) -> value.
PEER = "llama.cpp 2026-08"
PEER_VALUES = {
    ("minitron8b-F16", None, "prefill_tps", 2048, 0): 18224,
    ("minitron8b-F16", None, "decode_tps", 0, 0): 187.3,
    ("llama8b-Q4_K", None, "prefill_tps", 2048, 0): 10026,
    ("llama8b-Q4_K", None, "decode_tps", 0, 0): 285.1,
    ("llama8b-Q4_K", None, "decode_tps", 0, 32768): 177.5,
    ("minitron8b-F16", 2048, "prefill_tps", 1024, 0): 531,
    ("minitron8b-F16", 4096, "prefill_tps", 1024, 0): 586,
    ("minitron8b-F16", 8192, "prefill_tps", 1024, 0): 811,
    ("minitron8b-F16", 12288, "prefill_tps", 1024, 0): 1660,
    ("minitron8b-F16", 2048, "decode_tps", 0, 0): 5.3,
    ("minitron8b-F16", 4096, "decode_tps", 0, 0): 6.0,
    ("minitron8b-F16", 8192, "decode_tps", 0, 0): 8.7,
    ("minitron8b-F16", 12288, "decode_tps", 0, 0): 16.8,
    ("minitron8b-F16", 2048, "prefill_tps", 4096, 0): 1728,
    ("qwen30b-Q4_0", None, "prefill_tps", 2048, 0): 12236,
    ("qwen30b-Q4_0", None, "decode_tps", 0, 0): 308.2,
    ("qwen30b-Q4_0", 2048, "prefill_tps", 1024, 0): 4482,
    ("qwen30b-Q4_0", 4096, "prefill_tps", 1024, 0): 4390,
    ("qwen30b-Q4_0", 8192, "prefill_tps", 1024, 0): 6000,
    ("qwen30b-Q4_0", 12288, "prefill_tps", 1024, 0): 7545,
    ("qwen30b-Q4_0", 2048, "decode_tps", 0, 0): 35.8,
    ("qwen30b-Q4_0", 4096, "decode_tps", 0, 0): 46.0,
    ("qwen30b-Q4_0", 8192, "decode_tps", 0, 0): 55.1,
    ("qwen30b-Q4_0", 12288, "decode_tps", 0, 0): 95.0,
}
# The same on the processor of the machine, 14 threads.
CPU_PEER_VALUES = {
    ("qwen30b-Q4_0", None, "decode_tps", 0, 0): 24.5,
    ("llama8b-Q4_K", None, "decode_tps", 0, 0): 14.2,
    ("minitron8b-F16", None, "decode_tps", 0, 0): 4.78,
}
TENSOR_TFLOPS = 790  # bf16, measured on that machine
BUDGETS = "2G,4G,8G,12G,auto"
TEXT = "/usr/share/common-licenses/GPL-3"
SHAPES = [("minitron8b", "F16"), ("llama8b", "Q4_K")]
# Forced beside the plan that is searched.
STRATEGIES = [("minitron8b", "F16", ("auto", "ffn-host", "ffn-streamed", "streamed", "split")),
              ("qwen30b", "Q4_0", ("auto", "ffn-host", "ffn-streamed", "streamed",
                                   "experts-shared", "experts-mapped", "experts-fed"))]
# (shape, type, budgets, tokens of the prompt or 0: generation, plans)
RANDOM_PLANS = [("qwen30b", "Q4_0", "8G", 0, 200), ("minitron8b", "F16", "8G", 512, 60),
                ("qwen30b", "Q4_0", "8G", 512, 60), ("minitron8b", "F16", "8G", 0, 60)]


def copy_row(path):
    """Of the last of the longest passes in a trace: bytes to VRAM over its whole time, and the
    share of that time in which the copy engine was at work."""
    with open(path, encoding="utf-8") as f:
        events = [e for e in json.load(f)["traceEvents"]
                  if e["ph"] == "X" and e["pid"] == 1]
    n_tokens, last = max((e["args"]["tokens"], e["args"]["pass"]) for e in events)
    events = [e for e in events if e["args"]["pass"] == last]
    whole = next(e["dur"] for e in events if e["tid"] == 0)
    copies = [e for e in events if e["tid"] == 4]
    return {"metric": "copy_rate", "unit": "GB/s", "prompt_tokens": n_tokens,
            "value": sum(e["args"]["bytes"] for e in copies) / whole / 1e3,
            "limit_fraction": sum(e["dur"] for e in copies) / whole}


class Session:
    def __init__(self, args):
        self.args = args
        self.rows = []
        self.failed = []

    def program(self, name):
        return os.path.join(self.args.bin, name)

    def run(self, command, limit, log=None):
        print("$", " ".join(command), flush=True)
        try:
            done = subprocess.run(command, capture_output=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            self.failed.append(" ".join(command) + ": ran past its limit")
            return None
        if log:
            with open(os.path.join(os.path.dirname(self.args.out), log), "wb") as f:
                f.write(done.stdout + done.stderr)
        if done.returncode != 0:
            self.failed.append(" ".join(command))
            sys.stderr.write((done.stdout + done.stderr).decode(errors="replace")[-1500:])
            return None
        return done.stdout.decode(errors="replace")

    def model(self, shape, kind, skew=None):
        name = f"{shape}-skew-{kind}.gguf" if skew else f"{shape}-{kind}.gguf"
        path = os.path.join(self.args.tmp, name)
        if not os.path.exists(path):
            command = [self.program("sluice"), "synth", "--shape", shape, "--type", kind]
            self.run(command + (["--expert-skew", skew] if skew else []) + [path], 120)
        return path

    def add(self, row):
        row["model"] = row["model"].removesuffix(".gguf")
        row.setdefault("budget_mib", None)
        key = (row["model"], row["budget_mib"], row["metric"], row.get("prompt_tokens", 0),
               row.get("depth", 0))
        peers = CPU_PEER_VALUES if row.get("device") == "cpu" else PEER_VALUES
        if key in peers and row.get("batch", 1) == 1:
            row["peer"], row["peer_value"] = PEER, peers[key]
        self.rows.append(row)

    def bench(self, path, limit, repeats=None, **options):
        command = [self.program("sluice"), "bench", "-m", path, "-o", "json", "-r",
                   str(repeats or self.args.repeats)]
        for name, value in options.items():
            command += ["--" + name.replace("_", "-")] + ([value] if value is not None else [])
        text = self.run(command, limit)
        for row in json.loads(text)["rows"] if text else []:
            row["command"] = "sluice " + " ".join(command[1:]).replace(self.args.tmp + "/", "")
            if "strategy" in options:
                row["strategy"] = options["strategy"]
            self.add(row)
        self.save()

    def kl(self, path, n_prompt, budgets, n_gen=16, options=()):
        command = [self.program("bench-device_kl"), *options, path, "cuda", str(self.args.threads),
                   str(n_prompt), str(n_gen)] + budgets
        text = self.run(command, 200)
        first = self.rows[0] if self.rows else {}
        words = [os.path.basename(word) for word in command]
        for line in (text or "").splitlines():
            row = json.loads(line)
            row.update(date=str(datetime.date.today()), device="cuda", unit="nat",
                       commit=first.get("commit"), machine=first.get("machine"),
                       threads=self.args.threads, prompt_tokens=n_prompt, generated_tokens=n_gen,
                       command=" ".join(words))
            self.add(row)

    def checks(self):
        self.run([self.program("test_device_cuda")], 150, "device-tests.log")
        self.run([self.program("kcheck"), "--device", "cuda"], 150, "kcheck.log")

    def dense(self):
        for shape, kind in SHAPES:
            path = self.model(shape, kind)
            # Generation takes its time where 15 GiB are read for every token.
            slow = kind == "F16"
            self.bench(path, 200, 2 if slow else None, vram=BUDGETS, n_prompt="1024,2048",
                       n_gen="32" if slow else "64", ctx_size="2112")
        path = self.model("minitron8b", "F16")
        self.bench(path, 60, vram="2G", n_prompt="512,4096", n_gen="0")

    def mixture(self):
        path = self.model("qwen30b", "Q4_0")
        self.bench(path, 150, vram=BUDGETS, n_prompt="1024,2048", n_gen="64", ctx_size="2112")

    def accuracy(self):
        """KL divergence from the run on the CPU."""
        for shape, kind in SHAPES:
            self.kl(self.model(shape, kind), 256, ["2048", "0"])
        self.kl(self.model("qwen30b", "Q4_0"), 128, ["2048", "8192"])

    def skew(self):
        """A mixture whose experts are used as unevenly as those of real models."""
        path = self.model("qwen30b", "Q4_0", "0.65")
        self.bench(path, 100, vram="4G,8G", n_prompt="1024", n_gen="128", ctx_size="1216",
                   after_prompt=None)

    def context(self):
        """How generation slows down with depth, under a budget."""
        path = self.model("qwen30b", "Q4_0")
        self.bench(path, 150, vram="2G,4G,8G,12G", n_prompt="0", n_gen="32",
                   n_depth="1024,4096,16384", ctx_size="16448")
        self.bench(path, 90, 1, vram="8G", n_prompt="0", n_gen="32", n_depth="1024,65536",
                   ctx_size="65600")

    def parallel(self):
        """Sequences that generate together."""
        self.bench(self.model("qwen30b", "Q4_0"), 120, vram="8G", n_prompt="64", n_gen="32",
                   parallel="1,4,16,64", ctx_size="8192")

    def depth(self):
        self.bench(self.model("llama8b", "Q4_K"), 100, vram="auto", n_prompt="0", n_gen="64",
                   n_depth="32768")

    def copies(self):
        """How busy the copy engine is where a whole model is streamed."""
        path = self.model("minitron8b", "F16")
        trace = os.path.join(self.args.tmp, "trace.json")
        for n_prompt in ("512", "1024", "2048"):
            command = [self.program("sluice"), "bench", "-m", path, "--strategy", "streamed", "--vram",
                       "2G", "-p", n_prompt, "-n", "0", "-r", "2", "-c", "2112", "--trace", trace]
            if self.run(command, 60) is None:
                continue
            row = copy_row(trace)
            first = self.rows[0] if self.rows else {}
            row.update(date=str(datetime.date.today()), device="cuda", commit=first.get("commit"),
                       machine=first.get("machine"), threads=self.args.threads,
                       model=os.path.basename(path), budget_mib=2048,
                       command="sluice " + " ".join(command[1:]).replace(self.args.tmp + "/", ""))
            self.add(row)

    def strategies(self):
        """What is searched beside what is published, generation and prompts."""
        for shape, kind, names in STRATEGIES:
            for name in names:
                self.bench(self.model(shape, kind), 60, 3, strategy=name, vram="2G,8G",
                           n_prompt="512", n_gen="6", ctx_size="1216")

    def random_plans(self):
        """The plan in use beside plans drawn at random: how long a pass by the fastest of them takes."""
        for shape, kind, budgets, n_prompt, n_plans in RANDOM_PLANS:
            before = len(self.rows)
            self.bench(self.model(shape, kind), 120, 1, vram=budgets, n_prompt=str(n_prompt),
                       n_gen="0" if n_prompt else "8", ctx_size="1216", random_plans=str(n_plans))
            for row in (r for r in self.rows[before:] if "chosen_ms" in r):
                row.update(metric="random_plans", of=row["metric"], unit="times the chosen plan's pass",
                           value=row["random_best_ms"] / row["chosen_ms"])

    def cpu(self):
        """The processor of the machine alone."""
        for shape, kind, n in (("qwen30b", "Q4_0", "64"), ("llama8b", "Q4_K", "32"),
                               ("minitron8b", "F16", "16")):
            self.bench(self.model(shape, kind), 100, device="cpu", threads="14", n_prompt="128",
                       n_gen=n)

    def kernels(self, program, name):
        """What a benchmark of kernels prints, as bench/results/kernels has it (tools/kernel_table.py)."""
        text = self.run([self.program(program), "--json"], 150)
        if not text:
            return
        measured = json.loads(text)
        first = self.rows[0] if self.rows else {}
        data = {"date": str(datetime.date.today()), "commit": first.get("commit"),
                "machine": first.get("machine"), "device": "cuda",
                "command": f"{program} --json", "tensor_tflop_per_s": TENSOR_TFLOPS,
                "rows": [r for r in measured if "type" in r]}
        data.update(next((r for r in measured if "copy_gb_per_s" in r), {}))
        path = os.path.join(os.path.dirname(self.args.out), f"{name}.json")
        with open(path, "w", encoding="utf-8") as f:
            json.dump(data, f, indent=1)
            f.write("\n")

    def products(self):
        self.kernels("bench-cuda_linear", "products")

    def operators(self):
        self.kernels("bench-cuda_ops", "operators")

    def real(self, path):
        self.bench(path, 60, vram="32M,64M,auto", n_prompt="512", n_gen="64")
        self.kl(path, 256, ["64", "128", "0"])
        # Up to 16 tokens kernels round activations to 8 bits, as the CPU does; beyond they do not.
        self.kl(path, 256, ["64", "0"], 0, ["--exact", "--text", TEXT, "--passes", "1,4,16,64,256"])
        text = self.run([self.program("sluice"), "perplexity", "-m", path, "--json",
                         TEXT], 100)
        if text and self.rows:
            first = self.rows[0]
            value = json.loads(text)
            self.add({"date": str(datetime.date.today()), "commit": first.get("commit"),
                      "machine": first.get("machine"), "device": "cuda", "threads": self.args.threads,
                      "model": os.path.basename(path), "metric": "perplexity", "unit": "",
                      "command": f"sluice perplexity -m {os.path.basename(path)} GPL-3",
                      "value": value["perplexity"]})

    def save(self):
        with open(self.args.out, "w", encoding="utf-8") as f:
            json.dump(self.rows, f, indent=1)
            f.write("\n")

    def finish(self):
        print(f"\n{'model':16} {'budget':>7} {'metric':12} {'prompt':>6} {'depth':>6} {'value':>10}"
              f" {'spread':>7} {'predicted':>9} {'limit':>6} {'peak':>8} {'peer':>8}")
        for r in self.rows:
            print(f"{r['model'][:16]:16} {str(r['budget_mib']):>7} {r['metric']:12} "
                  f"{r.get('prompt_tokens', 0):>6} {r.get('depth', 0):>6} {r['value']:>10.5g} "
                  f"{r.get('spread', 0):>7.1%} {r.get('predicted', 0):>9.5g} "
                  f"{r.get('limit_fraction', 0):>6.0%} {r.get('peak_vram_mib', 0):>8.0f} "
                  f"{r.get('peer_value', '')!s:>8}")
        for line in self.failed:
            print("FAILED:", line)
        return 1 if self.failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", required=True, help="folder of the programs")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--tmp", default="/dev/shm", help="folder for synthetic models")
    parser.add_argument("--threads", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("jobs", nargs="+")
    session = Session(parser.parse_args())
    for job in session.args.jobs:
        if job.endswith(".gguf"):
            session.real(job)
        else:
            getattr(session, job)()
        session.save()
    return session.finish()


if __name__ == "__main__":
    sys.exit(main())
