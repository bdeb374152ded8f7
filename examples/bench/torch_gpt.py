"""PyTorch's side of `bench`: the same GPT, the same batch, the same settings, eager mode.

    python3 torch_gpt.py --layers 12 --heads 12 --width 768 --context 1024 --batch 8 --vocabulary 50304 --output torch.json

Prints one JSON object a line: setting, median milliseconds a step, peak bytes (reserved, and in use), last loss.
Setting tf32 is f32 whose matrix products may use TF32.
"""

import argparse
import gc
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x):
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=2)
        )
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(read.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.outer(F.gelu(self.inner(self.feed_forward_norm(x))))


class Gpt(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.token = nn.Embedding(o.vocabulary, o.width)
        self.position = nn.Embedding(o.context, o.width)
        self.blocks = nn.ModuleList(Block(o.width, o.heads) for _ in range(o.layers))
        self.norm = nn.LayerNorm(o.width)
        self.head = nn.Linear(o.width, o.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


LOW = {"f32": None, "tf32": None, "bf16": torch.bfloat16, "f16": torch.float16}


def run(setting, o, device):
    torch.manual_seed(42)
    torch.set_float32_matmul_precision("high" if setting == "tf32" else "highest")
    # What the allocator kept of the last setting counts as reserved from the start.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = Gpt(o).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=setting == "f16")
    low = LOW[setting]
    tokens = torch.randint(o.vocabulary, (o.batch, o.context + 1), device=device)
    times = []
    for _ in range(o.warmup + o.steps):
        start = time.perf_counter()
        with torch.autocast(device.type, dtype=low or torch.bfloat16, enabled=low is not None):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, o.vocabulary), tokens[:, 1:].reshape(-1))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    reserved = torch.cuda.max_memory_reserved() if device.type == "cuda" else None
    in_use = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "framework": f"torch {torch.__version__}",
        "setting": setting,
        "milliseconds": statistics.median(times[o.warmup :]),
        "peak_bytes": reserved,
        "peak_in_use_bytes": in_use,
        "loss": value,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(
        layers=12, heads=12, width=768, context=1024, batch=8, vocabulary=50304, warmup=5, steps=20
    ).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--settings", default="f32,tf32,bf16,f16")
    parser.add_argument("--output")
    o = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = []
    for setting in o.settings.split(","):
        result = run(setting, o, device)
        results.append(result)
        print(json.dumps(result), flush=True)
    if o.output:
        with open(o.output, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
