"""What one more sequence adds to the peak of a training step on LibTorch and in PyTorch, by the ledger or allocator and by the process.

    python3 sequence_bytes.py target/release/examples/bench [RUNS] [BYTES.json] > bytes.md

A run measures each setting at each batch, in a process of its own, and lays a line through its peaks: the slope is what a sequence adds, without
what is there for any batch (parameters, optimizer, low copies of weights). Medians of the runs' slopes, with the least and the most. The last
column is the share of bytes that is less than in the same framework's f32, of the same run. Needs python3 with PyTorch, and the environment of docs/libtorch.md.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

BATCHES = [16, 32, 64]
MODEL = "--layers 6 --heads 6 --width 384 --context 128 --steps 1 --warmup 1 --settings".split()
TORCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples", "bench", "torch_gpt.py")


def measured(command, environment):
    """The JSON that a command writes."""
    with tempfile.TemporaryDirectory() as directory:
        file = f"{directory}/results.json"
        subprocess.run([*command, "--output", file], check=True, stdout=subprocess.DEVNULL, env=os.environ | environment)
        with open(file) as results:
            return json.load(results)


def peaks(bench, batch):
    """By framework and setting: bytes by the ledger or the allocator, and of the process."""
    size = ["--batch", str(batch)]
    report = measured([bench, "--backend", "tch", "--memory", *MODEL, "bare,off,bf16", *size], {})
    for result in report["results"]:
        figures = result["measured"]
        yield f"Burn {result['setting']}", (figures["step_bytes"], figures["memory"]["in_use_bytes"])
    for setting in ["f32", "bf16"]:
        command = [sys.executable, TORCH, *MODEL, setting, *size, "--vocabulary", "256"]
        [result] = measured(command, {"MALLOC_MMAP_THRESHOLD_": "65536"})  # as `bench --memory` does
        yield f"PyTorch {setting}", (result["step_bytes"], result["peak_in_use_bytes"])


def slopes(run):
    """MiB a sequence: by framework and setting, the ledger's and the process's."""
    return {
        name: [
            statistics.linear_regression(BATCHES, [run[str(batch)][name][way] for batch in BATCHES]).slope / 2**20
            if run[str(BATCHES[0])][name][way] is not None
            else None
            for way in (0, 1)
        ]
        for name in run[str(BATCHES[0])]
    }


def cell(values, unit=""):
    if None in values:
        return ""
    return f"{statistics.median(values):.1f}{unit} ({min(values):.1f} to {max(values):.1f})"


def main():
    bench, runs = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    all_runs = [{str(batch): dict(peaks(bench, batch)) for batch in BATCHES} for _ in range(runs)]
    if len(sys.argv) > 3:
        with open(sys.argv[3], "w") as file:
            json.dump(all_runs, file, indent=1)
    lines = [slopes(run) for run in all_runs]
    print("| MiB a sequence | ledger or allocator | less | process | less |\n|---|---:|---:|---:|---:|")
    for name in lines[0]:
        row = [name]
        for way in (0, 1):
            row.append(cell([line[name][way] for line in lines]))
            f32 = {"Burn bf16": "Burn off", "PyTorch bf16": "PyTorch f32"}.get(name)
            row.append(cell([100 * (1 - line[name][way] / line[f32][way]) for line in lines], " %") if f32 else "")
        print(f"| {' | '.join(row)} |")


main()
