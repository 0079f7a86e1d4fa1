#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ours and a peer on the CPU: the same files, in turns, in one run; results as JSON rows.

    bench/cpu_peer.py --bin build/bin --out bench/results/DATE-cpu.json [MODEL...]

The peer is llama.cpp through llama-cpp-python, built here with the machine's own instructions into a
virtual environment (--venv; made when it lacks the package). A MODEL is SHAPE-TYPE, made by
`sluice synth` with as few layers as keep runs short, or a GGUF file; without any, all of the list
below. Each is measured with every number of --threads: a prompt of 512 in one pass, then tokens one by one
from an empty cache, medians of --runs. How many times the peer's speed ours is, is the median over the turns as
well: a shared machine's memory is faster in some minutes than in others. Only the standard library is needed.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import venv

SHAPES = {"llama1b": 6, "llama3b": 4, "smollm2-135m": 0}  # layers; 0: all
TYPES = ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "F16", "BF16"]
DEFAULT = [f"{shape}-{kind}" for shape in ("llama1b", "llama3b") for kind in TYPES]
# The small model's 576 columns are no whole super-blocks.
DEFAULT += [f"smollm2-135m-{kind}" for kind in ("Q4_0", "Q8_0", "F16", "BF16")]

# What runs inside the peer's environment: a model stays loaded; each line on standard input is
# "threads prompt generated", each answer two times in seconds.
PEER = r"""
import ctypes, json, sys, time
import llama_cpp as lc

lc.llama_backend_init()
quiet = lc.llama_log_callback(lambda level, text, data: None)
lc.llama_log_set(quiet, ctypes.c_void_p(0))
params = lc.llama_model_default_params()
params.n_gpu_layers = 0
model = lc.llama_model_load_from_file(sys.argv[1].encode(), params)
n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))

def decode(context, tokens):
    array = (lc.llama_token * len(tokens))(*tokens)
    if lc.llama_decode(context, lc.llama_batch_get_one(array, len(tokens))) != 0:
        sys.exit("the peer cannot decode")

def token(i):
    return (i * 7919 + 11) % n_vocab

print(json.dumps({"version": lc.__version__}), flush=True)
for line in sys.stdin:
    threads, n_prompt, n_gen = map(int, line.split())
    params = lc.llama_context_default_params()
    params.n_ctx = n_prompt + n_gen + 64
    params.n_batch = params.n_ubatch = n_prompt
    params.n_threads = params.n_threads_batch = threads
    context = lc.llama_init_from_model(model, params)
    memory = lc.llama_get_memory(context)
    decode(context, [token(0), token(1)])  # wakes the threads, touches the weights
    lc.llama_memory_clear(memory, True)
    start = time.perf_counter()
    decode(context, [token(i) for i in range(n_prompt)])
    prefill = time.perf_counter() - start
    lc.llama_memory_clear(memory, True)
    start = time.perf_counter()
    for i in range(n_gen):
        decode(context, [token(i)])
    print(json.dumps({"prefill": prefill, "decode": time.perf_counter() - start}), flush=True)
    lc.llama_free(context)
"""


def peer_python(folder):
    """The interpreter of an environment that has the peer."""
    python = os.path.join(folder, "bin", "python")
    if not os.path.exists(python):
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode != 0:
        print("building the peer: some minutes", flush=True)
        subprocess.run([python, "-m", "pip", "install", "--no-binary", "llama-cpp-python",
                        "llama-cpp-python"], check=True,
                       env=dict(os.environ, CMAKE_ARGS="-DGGML_NATIVE=ON"))
    return python


class Peer:
    def __init__(self, python, path):
        self.process = subprocess.Popen([python, "-c", PEER, path], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.version = self.answer()["version"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("the peer has ended")
        return json.loads(line)

    def measure(self, threads, n_prompt, n_gen):
        self.process.stdin.write(f"{threads} {n_prompt} {n_gen}\n")
        self.process.stdin.flush()
        times = self.answer()
        return {"prefill_tps": n_prompt / times["prefill"], "decode_tps": n_gen / times["decode"]}

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def model_path(args, name):
    """(Name in the results, type or None, path); made if it is not there."""
    if name.endswith(".gguf"):
        return os.path.basename(name).removesuffix(".gguf"), None, name
    shape, _, kind = name.rpartition("-")
    layers = args.layers if args.layers is not None else SHAPES.get(shape, 0)
    if layers:
        name = f"{shape}-{layers}-layers-{kind}"
    path = os.path.join(args.tmp, name + ".gguf")
    if not os.path.exists(path):
        command = [os.path.join(args.bin, "sluice"), "synth", "--shape", shape, "--type", kind]
        subprocess.run(command + (["--layers", str(layers)] if layers else []) + [path], check=True)
    return name, kind, path


def our_command(args, path, threads):
    return [os.path.join(args.bin, "sluice"), "bench", "-m", path, "--device", "cpu",
            "-t", str(threads), "-p", str(args.prompt), "-n", str(args.gen), "-r", "1", "-o", "json"]


def spread(values):
    return (max(values) - min(values)) / statistics.median(values)


def measure(args, peer, name, kind, path, threads):
    """The two rows of a model and a number of threads."""
    ours, theirs = {}, {}

    def measure_ours():
        done = subprocess.run(our_command(args, path, threads), capture_output=True, text=True, check=True)
        for row in json.loads(done.stdout)["rows"]:
            ours.setdefault(row["metric"], []).append(row)

    def measure_peer():
        for metric, value in peer.measure(threads, args.prompt, args.gen).items():
            theirs.setdefault(metric, []).append(value)

    for turn in range(args.runs):
        for one in (measure_ours, measure_peer) if turn % 2 == 0 else (measure_peer, measure_ours):
            one()
    rows = []
    for metric, measured in ours.items():
        values = [row["value"] for row in measured]
        row = {key: measured[0][key] for key in
               ("date", "commit", "machine", "device", "prompt_tokens", "generated_tokens", "depth",
                "batch", "threads", "unit")}
        row |= {"model": name, "type": kind, "budget_mib": None, "metric": metric,
                "value": statistics.median(values), "runs": args.runs, "spread": spread(values),
                "peer": f"llama.cpp of llama-cpp-python {peer.version}",
                "peer_value": statistics.median(theirs[metric]), "peer_spread": spread(theirs[metric]),
                "peer_ratio": statistics.median(a / b for a, b in zip(values, theirs[metric])),
                "command": f"bench/cpu_peer.py --threads {threads} --runs {args.runs} {name}"}
        rows.append(row)
        print(f"{name:28} {threads:>2} {metric:12} {row['value']:>9.4g} {row['spread']:>6.1%}"
              f"   peer {row['peer_value']:>9.4g} {row['peer_spread']:>6.1%}"
              f"   {row['peer_ratio']:>5.2f} x", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", required=True, help="folder of the programs")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--venv", help="environment of the peer [peer, beside the programs' folder]")
    parser.add_argument("--tmp", default="/dev/shm", help="folder for synthetic models [%(default)s]")
    parser.add_argument("--threads", default="1,2", help="[%(default)s]")
    parser.add_argument("--runs", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--prompt", type=int, default=512, help="[%(default)s]")
    parser.add_argument("--gen", type=int, default=32, help="[%(default)s]")
    parser.add_argument("--layers", type=int, help="of synthetic models; 0: all")
    parser.add_argument("--keep", action="store_true", help="keep synthetic models")
    parser.add_argument("models", nargs="*")
    args = parser.parse_args()
    beside = os.path.join(os.path.dirname(os.path.abspath(args.bin)), "peer")
    python = peer_python(args.venv or beside)
    rows = []
    for wanted in args.models or DEFAULT:
        name, kind, path = model_path(args, wanted)
        peer = Peer(python, path)
        for threads in map(int, args.threads.split(",")):
            rows += measure(args, peer, name, kind, path, threads)
        peer.close()
        if kind and not args.keep:
            os.remove(path)
        if args.out:  # after each model: a run takes long, and may be stopped
            with open(args.out, "w", encoding="utf-8") as f:
                json.dump(rows, f, indent=1)
                f.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
