"""Writes golden.json: losses and gradients of PyTorch in f64, which main.rs compares with.

    python3 golden.py > golden.json
"""

import json

import torch
from torch.nn.functional import cross_entropy

ROWS, WIDTH, CLASSES = 7, 24, 9
TARGETS = [3, 0, 8, 5, 3, 1, 7]


def numbers(shape, seed):
    """Between -0.5 and 0.5, as in main.rs."""
    count = torch.Size(shape).numel()
    values = [((i * 7919 + seed * 104_729) % 1009) / 1009 - 0.5 for i in range(count)]
    return torch.tensor(values, dtype=torch.float32).double().reshape(shape)


def case(name, bias=False, ignored=(), smoothing=0.0, z_loss=0.0, weighted=False, reduction="mean"):
    # With 4 times the width of `numbers`, so that probabilities are far from even.
    hidden = (4 * numbers([ROWS, WIDTH], 1)).requires_grad_()
    weight = numbers([WIDTH, CLASSES], 2).requires_grad_()
    offset = numbers([CLASSES], 3).requires_grad_() if bias else None
    targets = torch.tensor(TARGETS)
    targets[list(ignored)] = -100
    logits = hidden @ weight + (offset if bias else 0)
    losses = cross_entropy(logits, targets, ignore_index=-100, label_smoothing=smoothing, reduction="none")
    counted = (targets != -100).double()
    losses = losses + z_loss * torch.logsumexp(logits, 1) ** 2 * counted
    weights = (numbers([ROWS], 4) + 1) * counted if weighted else counted
    items = weights.sum()
    loss = (losses * weights).sum() / {"mean": items, "sum": 1, "batch_mean": ROWS}[reduction]
    if not weighted and not z_loss and reduction != "batch_mean":
        whole = cross_entropy(logits, targets, ignore_index=-100, label_smoothing=smoothing, reduction=reduction)
        torch.testing.assert_close(loss, whole, rtol=1e-14, atol=0)
    loss.backward()
    operands = {"hidden": hidden, "weight": weight} | ({"bias": offset} if bias else {})
    flat = {key: [float(f"{x:.9g}") for x in operand.grad.flatten()] for key, operand in operands.items()}
    return dict(
        name=name,
        bias=bias,
        ignored=list(ignored),
        smoothing=smoothing,
        z_loss=z_loss,
        weighted=weighted,
        reduction=reduction,
        loss=loss.item(),
        items=items.item(),
        gradients=flat,
    )


cases = [
    case("mean"),
    case("sum, bias", bias=True, reduction="sum"),
    case("mean over all rows", ignored=[2], reduction="batch_mean"),
    case("ignored", ignored=[0, 4, 6]),
    case("smoothing, ignored", smoothing=0.1, ignored=[3]),
    case("z-loss, bias", z_loss=0.01, bias=True),
    case("all", bias=True, ignored=[1, 5], smoothing=0.2, z_loss=0.02, weighted=True),
    case("sum of weighted", weighted=True, ignored=[6], reduction="sum"),
]
print("{\"torch\": " + json.dumps(torch.__version__) + ", \"cases\": [")
print(",\n".join(json.dumps(case) for case in cases))
print("]}")
