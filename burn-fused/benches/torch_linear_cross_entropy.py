"""PyTorch's side of the `linear_cross_entropy` bench: the loss with its backward pass, over full logits and in chunks.

    python3 torch_linear_cross_entropy.py --rows 8192 --classes 128000      # every setting in a process of its own; CSV

`full` is torch.nn.functional.cross_entropy over all logits; `chunked` is Liger's form in plain PyTorch: gradients of each chunk are
computed in the forward pass of an autograd function and scaled in its backward; `scopes` is torch.utils.checkpoint over chunks. Peak bytes
are resident memory above what the process held before the step; the first step of each process warms up on one chunk.
"""

import argparse
import os
import subprocess
import sys
import time

from torch_memory import MALLOC, status


def measure(o):
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint

    torch.set_num_threads(o.threads)
    torch.manual_seed(42)

    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, targets):
            loss, hidden_grad, weight_grad = 0.0, torch.empty_like(hidden), torch.zeros_like(weight)
            for start in range(0, len(hidden), o.chunk):
                rows = slice(start, start + o.chunk)
                logits = hidden[rows] @ weight.T
                sums = torch.logsumexp(logits, 1, keepdim=True)
                expected = targets[rows, None]
                loss += (sums - logits.gather(1, expected)).sum() / len(hidden)
                grad = logits.sub_(sums).exp_().div_(len(hidden))
                grad.scatter_add_(1, expected, torch.full_like(sums, -1 / len(hidden)))
                hidden_grad[rows] = grad @ weight
                weight_grad.addmm_(grad.T, hidden[rows])
            ctx.save_for_backward(hidden_grad, weight_grad)
            return loss

        @staticmethod
        def backward(ctx, scale):
            hidden_grad, weight_grad = ctx.saved_tensors
            return hidden_grad.mul_(scale), weight_grad.mul_(scale), None

    def loss(hidden, weight, targets):
        if o.setting == "full":
            return cross_entropy(hidden @ weight.T, targets)
        if o.setting == "chunked":
            return Chunked.apply(hidden, weight, targets)
        part = lambda hidden, targets: cross_entropy(hidden @ weight.T, targets, reduction="sum")
        parts = zip(hidden.split(o.chunk), targets.split(o.chunk))
        return sum(checkpoint(part, *rows, use_reentrant=False) for rows in parts) / len(hidden)

    hidden = torch.randn(o.rows, o.width, requires_grad=True)
    weight = torch.randn(o.classes, o.width).mul_(0.05).requires_grad_()
    targets = torch.randint(0, o.classes, (o.rows,))
    loss(hidden[: o.chunk], weight[:1000], targets[: o.chunk] % 1000).backward()
    hidden.grad = weight.grad = None
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    start = time.perf_counter()
    loss(hidden, weight, targets).backward()
    milliseconds = 1e3 * (time.perf_counter() - start)
    peak = (status("VmHWM") - before) / 2**20
    print(f"{o.rows},{o.width},{o.classes},torch {torch.__version__} {o.setting},{milliseconds:.0f},{peak:.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(rows=2048, width=512, classes=32000, chunk=256, threads=2).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--setting")
    o = parser.parse_args()
    if o.setting:
        return measure(o)
    print("rows,width,classes,setting,milliseconds,peak_mib")
    for setting in ["full", "chunked", "scopes"]:
        subprocess.run([sys.executable, *sys.argv, "--setting", setting], env=os.environ | MALLOC, check=True)


if __name__ == "__main__":
    main()
