"""PyTorch's side of the `attention` bench: `scaled_dot_product_attention` with its backward pass, by the length of the sequence.

    python3 torch_attention.py [--tokens 128,256,512,1024,2048] [--rounds 7]      # every size in a process of its own; CSV

`sdpa` is PyTorch's choice of a kernel (on a CPU in f32 its flash attention), `math` its composition of two products and a softmax. Peak
bytes are resident memory above what the process held before a step, of the largest of the steps; the time is the middle one of the rounds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from torch_memory import MALLOC, status


def measure(o):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(o.threads)
    torch.manual_seed(42)
    tokens = int(o.tokens)
    shape = (1, o.heads, tokens, o.width)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    weight = torch.randn(shape)
    kernels = [SDPBackend.MATH] if o.setting == "math" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def step():
        query.grad = key.grad = value.grad = None
        before = status("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        start = time.perf_counter()
        with sdpa_kernel(kernels):
            result = scaled_dot_product_attention(query, key, value, is_causal=o.causal)
        (result * weight).sum().backward()
        milliseconds = 1e3 * (time.perf_counter() - start)
        return milliseconds, (status("VmHWM") - before) / 2**20

    step()
    times, peaks = zip(*(step() for _ in range(o.rounds)))
    causal = str(o.causal).lower()
    print(f"0,{tokens},{causal},torch {torch.__version__} {o.setting},{statistics.median(times):.1f},,{max(peaks):.2f},,", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(heads=4, width=64, threads=2, rounds=7).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", default="128,256,512,1024,2048")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--settings", default="sdpa,math")
    parser.add_argument("--setting")
    o = parser.parse_args()
    if o.setting:
        return measure(o)
    print("layers,tokens,causal,setting,milliseconds,times_first,peak_mib,of_first,loss")
    for tokens in o.tokens.split(","):
        for causal in [[], ["--causal"]]:
            for setting in o.settings.split(","):
                arguments = ["--tokens", tokens, "--setting", setting, *causal]
                subprocess.run([sys.executable, *sys.argv, *arguments], env=os.environ | MALLOC, check=True)


if __name__ == "__main__":
    main()
