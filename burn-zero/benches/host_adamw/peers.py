"""One AdamW step of a peer for each line on stdin; answers with its seconds. The first line lists the peers there are."""

import os
import sys
import time

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer

import torch

elements = int(sys.argv[1])


def parameter():
    tensor = torch.nn.Parameter(torch.ones(elements))
    tensor.grad = torch.full((elements,), 1e-3)
    return tensor


def deepspeed_cpu_adam():
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([parameter()], adamw_mode=True)


peers = {
    "PyTorch_AdamW_fused": lambda: torch.optim.AdamW([parameter()], fused=True),
    "PyTorch_AdamW_foreach": lambda: torch.optim.AdamW([parameter()], foreach=True),
    "DeepSpeed_CPUAdam": deepspeed_cpu_adam,
}
optimizers = {}
for name, make in peers.items():
    try:
        optimizers[name] = make()
        optimizers[name].step()
    except Exception as error:
        optimizers.pop(name, None)
        print(f"{name} is not available: {error}", file=sys.stderr)

print(" ".join(optimizers), file=answers, flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    optimizers[line.strip()].step()
    print(time.perf_counter() - start, file=answers, flush=True)
