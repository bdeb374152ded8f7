"""PyTorch's side of the `chain` bench: the same 24 blocks, eager mode, plain and under torch.utils.checkpoint.

    python3 torch_chain.py                  # every setting, each in a process of its own; one JSON object a line

Rounds of all settings cannot be interleaved across processes, so `plain` runs before and after: what the two differ by is
the machine's noise. Peak bytes are resident memory above what the process held before the first forward pass.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time

# Large blocks go back to the system when they are freed, or resident memory would only grow.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def status(key):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", file.read())[1])


def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def keep_compute():
    """Saves matrix products and recomputes the rest (PyTorch's selective activation checkpointing)."""
    import torch
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    return create_selective_checkpoint_contexts([aten.mm.default, aten.addmm.default, aten.bmm.default])


def measure(o):
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(42)
    torch.set_num_threads(o.threads)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(o.width)
            self.inner = nn.Linear(o.width, 4 * o.width)
            self.outer = nn.Linear(4 * o.width, o.width)

        def forward(self, x):
            return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))

    blocks = nn.ModuleList(Block() for _ in range(o.blocks))
    x = torch.randn(o.tokens, o.width)

    def step():
        y = x
        for block in blocks:
            if o.setting == "plain":
                y = block(y)
            elif o.setting == "every-block":
                y = checkpoint(block, y, use_reentrant=False)
            else:
                y = checkpoint(block, y, use_reentrant=False, context_fn=keep_compute)
        y.square().mean().backward()
        for p in blocks.parameters():
            p.grad = None

    step()
    before = status("VmRSS")
    reset_peak()
    times = []
    for _ in range(o.steps):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    print(
        json.dumps(
            {
                "framework": f"torch {torch.__version__}",
                "setting": o.setting,
                "milliseconds": round(statistics.median(times), 1),
                "peak_bytes": status("VmHWM") - before,
            }
        ),
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(blocks=24, width=256, tokens=1024, steps=10, threads=2).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--setting")
    o = parser.parse_args()
    if o.setting:
        return measure(o)
    for setting in ["plain", "every-block", "keep-compute", "plain"]:
        subprocess.run([sys.executable, *sys.argv, "--setting", setting], env=os.environ | MALLOC, check=True)


if __name__ == "__main__":
    main()
