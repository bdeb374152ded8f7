"""The planner's choice beside every setting of a grid, trained for real on this CPU.

    cargo build --release --example fit --example gpt
    python3 planner.py target/release/examples [MEMORY ..] > planner.md

Of each memory (MiB or GiB, such as 24G) `fit --device cpu` chooses a setting of the gpt example; each setting of the grid that fits, by its estimated
peak, is trained in rounds, one after the other, and its median of tokens a second counts. The text is short, so that validation is a small part. Needs
Python alone.
"""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

ROUNDS = 3
TEXT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "zero.md")
STEPS = ["--steps", "12", "--eval-every", "12", "--text", TEXT]
BATCH = 16


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def grid():
    for checkpoint, amp, offload in itertools.product(
        ["none", "keep-compute", "block", "offload"], ["off", "bf16"], [[], ["--offload"]]
    ):
        for batch in [16, 8, 4, 2]:
            if amp == "off" or (batch == 16 and checkpoint in ("none", "block")):
                yield ["--batch", str(batch), "--accum", str(BATCH // batch), "--amp", amp, "--checkpoint", checkpoint, *offload]
    for batch, budget, offload in [(16, 20, []), (16, 1000, []), (8, 12, []), (8, 17, ["--offload"])]:
        yield ["--batch", str(batch), "--accum", str(BATCH // batch), "--amp", "off", "--checkpoint", f"budget={budget}", *offload]


def speed(programs, setting):
    with tempfile.TemporaryDirectory() as directory:
        run(f"{programs}/gpt", *setting, *STEPS, "--output", directory)
        with open(f"{directory}/report.json") as file:
            return json.load(file)["tokens_per_second"]


def peak(programs, setting):
    """MiB at the peak, by the estimate."""
    size, unit = re.search(r": ([0-9.]+) ([KMG])iB at the peak", run(f"{programs}/fit", "--no-pools", *setting)).groups()
    return float(size) * {"K": 1 / 1024, "M": 1, "G": 1024}[unit]


def main():
    programs, memories = sys.argv[1], sys.argv[2:] or ["24G", "24M"]
    peaks = {tuple(setting): peak(programs, setting) for setting in grid()}
    chosen = {}
    for memory in memories:
        report = run(f"{programs}/fit", "--batch", str(BATCH), "--device", "cpu", "--memory", memory)
        chosen[memory] = tuple(re.search(r"left  setting\n(?: +[0-9.]+){4}  (.*)", report)[1].split())
        if chosen[memory] not in peaks:
            peaks[chosen[memory]] = peak(programs, list(chosen[memory]))
    speeds = {setting: [] for setting in peaks}
    for _ in range(ROUNDS):
        for setting, measured in speeds.items():
            measured.append(speed(programs, list(setting)))
    speeds = {setting: statistics.median(measured) for setting, measured in speeds.items()}
    for memory in memories:
        limit = float(memory[:-1]) * {"M": 1, "G": 1024}[memory[-1]]
        fitting = {setting: value for setting, value in speeds.items() if peaks[setting] <= limit}
        best = max(fitting, key=fitting.get)
        own = chosen[memory]
        print(f"{memory}: {len(fitting)} settings fit; the planner's `{' '.join(own)}` {speeds[own]:.0f} tokens a second,")
        print(f"the best `{' '.join(best)}` {speeds[best]:.0f}: {speeds[own] / speeds[best]:.3f}\n")
    print("| setting | MiB | tokens a second |\n|---|---:|---:|")
    for setting in sorted(speeds, key=speeds.get, reverse=True):
        print(f"| `{' '.join(setting)}` | {peaks[setting]:.1f} | {speeds[setting]:.0f} |")


if __name__ == "__main__":
    main()
