"""PyTorch's side of `bench`: the same GPT, the same batch, the same settings, eager mode.

    python3 torch_gpt.py --layers 12 --heads 12 --width 768 --context 1024 --batch 8 --vocabulary 50304 --output torch.json

Prints one JSON object a line: setting, median milliseconds a step, peak bytes (reserved, and in use), what a step takes
beyond what was there before, last loss.

A setting is a precision, what becomes of activations, or both: bf16+block. tf32 is f32 whose matrix products may use TF32.
Of activations, `block` is torch.utils.checkpoint of every block, `keep-compute` selective checkpointing that saves matrix
products and attention, `offload` torch.autograd.graph.save_on_cpu.

One setting after the other is in memory, unless `--side-by-side`: then all of them are, and every round takes one step of
each, so that ratios to the first are those of a round. `bench --torch torch_gpt.py` starts it with `--serve FILE`, the weights and
tokens to begin with, and tells it when to take a step.
"""

import argparse
import gc
import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class Attention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x):
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=2)
        )
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dropout(self.output(read.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.dropout(self.outer(F.gelu(self.inner(self.feed_forward_norm(x)))))


def keep_compute():
    """Results of matrix products and attention are saved, the rest is computed once more."""
    aten = torch.ops.aten
    attention = [
        op.default
        for name in dir(aten)
        if name.startswith("_scaled_dot_product") and not name.endswith("backward")
        and hasattr(op := getattr(aten, name), "default")
    ]
    return create_selective_checkpoint_contexts([aten.mm.default, aten.addmm.default, aten.bmm.default, *attention])


def run_block(block, x, activations):
    if activations == "block":
        return checkpoint(block, x, use_reentrant=False)
    if activations == "keep-compute":
        return checkpoint(block, x, use_reentrant=False, context_fn=keep_compute)
    if activations == "offload":
        with torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda):
            return block(x)
    return block(x)


class Gpt(nn.Module):
    def __init__(self, o, activations):
        super().__init__()
        self.activations = activations
        self.token = nn.Embedding(o.vocabulary, o.width)
        self.position = nn.Embedding(o.context, o.width)
        self.blocks = nn.ModuleList(Block(o.width, o.heads, o.dropout) for _ in range(o.layers))
        self.dropout = nn.Dropout(o.dropout)
        self.norm = nn.LayerNorm(o.width)
        self.head = nn.Linear(o.width, o.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.dropout(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = run_block(block, x, self.activations)
        return self.head(self.norm(x))


LOW = {"f32": None, "tf32": None, "bf16": torch.bfloat16, "f16": torch.float16}
ACTIVATIONS = ["block", "keep-compute", "offload"]


def load(file, model, tokens):
    """Sets the weights to those in the file, f32 in Burn's order, and returns the tokens behind them, i32, as many as these."""
    numbers = torch.from_file(file, size=sum(p.numel() for p in model.parameters()) + tokens.numel(), dtype=torch.int32)
    *weights, tokens_read = numbers.split([*(p.numel() for p in model.parameters()), tokens.numel()])
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights):
            weight = weight.view(torch.float32)
            # Burn's linear layers have the weight transposed.
            is_linear = id(parameter) in linear
            parameter.copy_(weight.view(parameter.shape[::-1]).T if is_linear else weight.view(parameter.shape))
    return tokens_read.view(tokens.shape).long()


class Lane:
    """The training of one setting."""

    def __init__(self, setting, o, device):
        parts = setting.split("+")
        activations = parts.pop() if parts[-1] in ACTIVATIONS else None
        self.precision = parts[0] if parts else "f32"
        self.setting, self.o, self.device = setting, o, device
        self.low = LOW[self.precision]
        self.times = []
        torch.manual_seed(42)
        self.model = Gpt(o, activations)
        tokens = torch.randint(o.vocabulary, (o.batch, o.context + 1))
        if o.serve:
            tokens = load(o.serve, self.model, tokens)
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "f16")
        self.tokens = tokens.to(device)

    def step(self):
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        start = time.perf_counter()
        with torch.autocast(self.device.type, dtype=self.low or torch.bfloat16, enabled=self.low is not None):
            logits = self.model(self.tokens[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, self.o.vocabulary), self.tokens[:, 1:].reshape(-1))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.item()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(1e3 * (time.perf_counter() - start))

    def step_bytes(self):
        """The most that a step takes beyond what is there before it, as the allocator counts."""
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            most = torch.cuda.max_memory_allocated() - before
        else:
            cpu = torch.profiler.ProfilerActivity.CPU
            with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
                self.step()
            events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
            live = most = 0
            for event in sorted(events, key=lambda e: e.start_ns()):
                live += event.nbytes()
                most = max(most, live)
        self.times.pop()
        return most

    def result(self, reference):
        timed = self.times[self.o.warmup :]
        ratios = [own / other for own, other in zip(timed, reference.times[self.o.warmup :])]
        return {
            "framework": f"torch {torch.__version__}",
            "setting": self.setting,
            "milliseconds": statistics.median(timed),
            "ratio": quartiles(ratios) if reference is not self else None,
            "loss": self.loss,
            "step_bytes": self.step_bytes(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }


def operations(o, device):
    """Where the time of a step goes."""
    for setting in o.settings.split(","):
        lane = Lane(setting, o, device)
        for _ in range(o.warmup):
            lane.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(o.steps):
                lane.step()
        print(setting, "| ms a step | calls a step")
        rows = sorted(profile.key_averages(), key=lambda row: -row.self_cpu_time_total)
        for row in rows[:24]:
            print(f"{row.key} | {row.self_cpu_time_total / 1e3 / o.steps:.1f} | {row.count / o.steps:.0f}")


def serve(o, device):
    """Answers each line of standard input with one of standard output."""
    lane = Lane(o.settings, o, device)
    print(json.dumps({"parameters": sum(p.numel() for p in lane.model.parameters())}), flush=True)
    for line in sys.stdin:
        if line == "step\n":
            lane.step()
            answer = {"loss": lane.loss}
        else:
            answer = {"step_bytes": lane.step_bytes()}
        print(json.dumps(answer), flush=True)


def quartiles(sample):
    lower, median, upper = statistics.quantiles(sample, n=4, method="inclusive") if len(sample) > 1 else sample * 3
    return {"lower": lower, "median": median, "upper": upper}


def side_by_side(o, device):
    lanes = [Lane(setting, o, device) for setting in o.settings.split(",")]
    for round in range(o.warmup + o.steps):
        for number in range(len(lanes)):
            lanes[(round + number) % len(lanes)].step()
    for lane in lanes:
        yield lane.result(lanes[0])


def reset_process_peak():
    if sys.platform == "linux":
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")


def process_peak():
    """Resident memory. With MALLOC_MMAP_THRESHOLD_=65536 it is what is alive, as in the processes of `bench --memory`."""
    if sys.platform != "linux":
        return None
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM:"))


def one_by_one(o, device):
    for setting in o.settings.split(","):
        # What the allocator kept of the last setting counts as reserved from the start.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        lane = Lane(setting, o, device)
        for _ in range(o.warmup):
            lane.step()
        if device.type != "cuda":
            reset_process_peak()
        for _ in range(o.steps):
            lane.step()
        is_cuda = device.type == "cuda"
        peaks = {
            "peak_bytes": torch.cuda.max_memory_reserved() if is_cuda else None,
            "peak_in_use_bytes": torch.cuda.max_memory_allocated() if is_cuda else process_peak(),
        }
        yield lane.result(lane) | peaks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(
        layers=12, heads=12, width=768, context=1024, batch=8, vocabulary=50304, warmup=5, steps=20
    ).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--settings", default="f32,tf32,bf16,f16")
    parser.add_argument("--side-by-side", action="store_true")
    parser.add_argument("--operations", action="store_true", help="where the time of a step goes")
    parser.add_argument("--threads", type=int, help="of the CPU; PyTorch's choice without")
    parser.add_argument("--output")
    parser.add_argument("--serve", help="for bench --torch")
    o = parser.parse_args()
    if o.threads:
        torch.set_num_threads(o.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if o.operations:
        return operations(o, device)
    if o.serve:
        return serve(o, device)
    results = []
    for result in (side_by_side if o.side_by_side else one_by_one)(o, device):
        results.append(result)
        print(json.dumps(result), flush=True)
    if o.output:
        with open(o.output, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
