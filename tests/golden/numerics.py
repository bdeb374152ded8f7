"""Writes numerics.txt, the reference of the law tests/tests/laws/numerics: `python numerics.py` with torch 2.9.0.

For each case, in f16 and in bf16: the operands (numbers that the type holds), the value and every gradient in f64, and by PyTorch's
autocast: the case's function on operands of the low type, where `full` is a cast to f32, put where the CUDA autocast table puts it
(operations of the f32 list, every loss, every norm). The gradient is that of the sum of all results.

Format: `grid TYPE NAME ROWS COLUMNS` and a line of numbers; `case NAME TYPE GRID ..`, and for the value and each gradient a line of f64
and a line of PyTorch's errors, `inf` where PyTorch's is not finite.
"""
import math
import sys

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
EPSILON = 0.0

# Magnitudes from the smallest subnormal to the largest value.
MAGNITUDES = {
    torch.float16: [6e-8, 1e-6, 6.2e-5, 1e-3, 0.03, 0.3, 0.9, 1.0, 2.5, 6.5, 8.0, 11.5, 41.0, 45.0, 60.0, 257.0, 500.0, 4097.0, 30000.0, 65504.0],
    torch.bfloat16: [9.2e-41, 1.2e-38, 1e-30, 1e-20, 1e-10, 1e-4, 0.03, 0.3, 0.9, 1.0, 2.5, 6.5, 7.0, 8.0, 11.5, 41.0, 60.0, 500.0, 1e4, 1e7, 1e10, 1e15, 1e20, 1e30, 3.38e38],
}
FEW = {
    torch.float16: [6e-8, 6.2e-5, 1e-3, 0.3, 1.0, 41.0, 500.0, 1000.0, 65504.0],
    torch.bfloat16: [9.2e-41, 1e-30, 1e-10, 1e-3, 1.0, 41.0, 500.0, 1e25, 3.38e38],
}
ROW = [1.0, -0.7, 0.4, 0.25, -0.05, 0.8]
SCALES = {
    torch.float16: [1e-6, 1e-4, 1e-2, 1.0, 6.0, 50.0, 300.0, 2000.0, 60000.0],
    # Squares that f32 holds: PyTorch adds them up in f64 on a CPU, in f32 on a GPU.
    torch.bfloat16: [1e-17, 1e-10, 1e-6, 1e-2, 1.0, 6.0, 50.0, 300.0, 1e4, 1e10, 1e18],
}


def grids(dtype):
    few, many = FEW[dtype], MAGNITUDES[dtype]
    signed = [s * x for x in many for s in (1, -1)]
    first = [a for a in few for _ in few]
    second = [b for _ in few for b in few]
    minus = [-a if i % 3 == 1 else a for i, a in enumerate(first)]
    rows = [[s * x for x in ROW] for s in SCALES[dtype]]
    other = [[s * x for x in (0.9, 0.3, -0.6, 0.1, 0.5, -0.2)] for s in SCALES[dtype]]
    shuffled = [other[(i * 5 + 2) % len(other)] for i in range(len(other))]
    probabilities = [1e-6, 1e-3, 0.1, 0.4, 0.5, 0.6, 0.9, 0.95, 0.99]
    logits = [s * x for x in (0.01, 0.5, 1.0, 3.0, 6.25, 7.0, 9.0, 14.0, 20.0, 30.0) for s in (1, -1)]
    far_logits = logits + [s * x for x in (200.0, 30000.0) for s in (1, -1)]
    targets = [float(i % 4 > 1) for i in range(len(logits))]
    moderate = [[math.sin(1.3 * i + 0.7 * j) for j in range(4)] for i in range(4)]
    result = {
        "signed": [signed],
        "positive": [many],
        "unit": [[s * x for x in many if x <= 1 for s in (1, -1)] + [0.999, -0.999]],
        "above_one": [[x for x in many if x >= 1]],
        "first": [minus],
        "second": [second],
        "first_positive": [first],
        "rows": rows,
        "other_rows": other,
        "shuffled_rows": shuffled,
        "rows_above_epsilon": rows[1:],
        "other_rows_above_epsilon": other[1:],
        "tiny_rows": [[s * x for x in ROW] for s in (few[0] * 32, few[1])],
        "probabilities": [probabilities],
        "logits": [logits],
        "targets": [targets],
        "far_logits": [far_logits],
        "far_targets": [[float(i % 4 > 1) for i in range(len(far_logits))]],
        "soft_targets": [[0.2, 0.9, 0.5, 0.01, 0.7, 0.3, 0.99, 0.6, 0.05]],
        "counts": [[0.0, 1.0, 2.0, 7.0, 40.0, 3.0, 0.0, 1.0, 300.0]],
        "small_logits": [[-9.0, -3.0, 0.1, 0.5, 1.0, 2.0, 5.0, 7.0, 9.0]],
        "moderate": moderate,
        "regular": [[x + 2.0 * (i == j) for j, x in enumerate(row)] for i, row in enumerate(moderate)],
        "large": [[4000.0 * x for x in row] for row in moderate],
        "ones": [[1.0] * 4096],
        "exponents": [[(-2.5, -1.0, 0.5, 2.0, 3.0)[i % 5] for i in range(len(many))]],
        "gates": [[(0.5, -3.0, 8.0, -20.0, 60.0)[i % 5] for i in range(len(signed))]],
    }
    return {name: torch.tensor(values, dtype=torch.float64).to(dtype) for name, values in result.items()}


def full(x):
    """The cast to f32 of PyTorch's f32 list; the truth stays f64."""
    return x if x.dtype == torch.float64 else x.float()


def f32(function):
    """An operation of the f32 list, or a loss."""
    return lambda *operands: function(*map(full, operands))


def norm(p):
    return f32(lambda x: torch.linalg.vector_norm(x, p, 1))


def chunks(function):
    """On the left and the right half of the columns."""
    return lambda x: function(*x.chunk(2, 1))


def rms_norm(x):
    return F.rms_norm(x, (x.shape[1],), torch.ones(x.shape[1], dtype=x.dtype), 1e-5)


def batch_norm(x):
    return F.batch_norm(x, None, None, training=True, eps=1e-5)


def group_norm(x):
    return F.group_norm(x.reshape(x.shape[0], 2, 3), 1, eps=1e-5).reshape(x.shape)


def instance_norm(x):
    return F.instance_norm(x.reshape(x.shape[0], 2, 3), eps=1e-5).reshape(x.shape)


def attention(q, k, v):
    return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])[0, 0]


def cosine_similarity(a, b):
    # Burn's epsilon is the smallest normal number of the operands' type; below it the two clamp differently.
    return F.cosine_similarity(a, b, 1, EPSILON)


def cosine_embedding(a, b):
    cosine = cosine_similarity(a, b)
    is_similar = torch.arange(a.shape[0]) % 2 == 1
    return torch.where(is_similar, 1 - cosine, cosine.relu())


def bce_of_sigmoid(x, t):
    if x.dtype == torch.float64:
        # Exact also where the sigmoid is 1.
        return F.binary_cross_entropy_with_logits(x, t.detach(), reduction="sum")
    return F.binary_cross_entropy(full(torch.sigmoid(x)), full(t).detach(), reduction="sum")


def cross_entropy(x):
    return F.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1], reduction="sum")


def rnnt(x):
    """The transducer loss of two frames and one label, number 2, with the blank 0: two paths."""
    lattice = x.log_softmax(1).reshape(2, 2, 4)  # frame, labels before it, class
    blank, label = lattice[:, :, 0], lattice[:, 0, 2]
    late = blank[0, 0] + label[1]
    early = label[0] + blank[0, 1]
    return -(torch.logaddexp(early, late) + blank[1, 1])


def lu(x):
    # The factors below each other; the permutation is a constant.
    _, lower, upper = torch.linalg.lu(x)
    return torch.cat([lower, upper])


def corner_of(size, function):
    return f32(lambda x: function(x[:size, :size]))


def weighted(function):
    """The sum weighs results unequally, or the gradient of a norm is zero."""
    return lambda *x: (lambda y: y * torch.arange(1, y.shape[-1] + 1, dtype=y.dtype))(function(*x))


x1 = ["signed"]
POS = ["positive"]
PAIR = ["first", "second"]
CASES = {
    # FloatTensorOps, one operand
    "neg": (x1, torch.neg), "abs": (x1, torch.abs), "sign": (x1, torch.sign), "sqrt": (POS, torch.sqrt),
    "cos": (["unit"], torch.cos), "sin": (["unit"], torch.sin), "tanh": (x1, torch.tanh), "erf": (x1, torch.erf),
    "asinh": (x1, torch.asinh), "acosh": (["above_one"], torch.acosh), "atan": (x1, torch.atan), "atanh": (["unit"], torch.atanh),
    "round": (x1, torch.round), "floor": (x1, torch.floor), "ceil": (x1, torch.ceil), "trunc": (x1, torch.trunc),
    "exp": (x1, f32(torch.exp)), "log": (POS, f32(torch.log)), "log1p": (POS, f32(torch.log1p)), "recip": (x1, f32(torch.reciprocal)),
    "tan": (["unit"], f32(torch.tan)), "cosh": (x1, f32(torch.cosh)), "sinh": (x1, f32(torch.sinh)),
    "acos": (["unit"], f32(torch.acos)), "asin": (["unit"], f32(torch.asin)),
    "square": (x1, f32(torch.square)), "powi_scalar_3": (x1, f32(lambda x: x**3)), "powi_scalar_minus_2": (x1, f32(lambda x: x**-2)),
    "powf_scalar_2.5": (POS, f32(lambda x: x**2.5)), "powf_scalar_minus_1.5": (POS, f32(lambda x: x**-1.5)),
    "powf_scalar_0.1": (POS, f32(lambda x: x**0.1)), "powf_scalar_minus_0.5": (POS, f32(torch.rsqrt)),
    # a number as an operand
    "mul_scalar_2e-8": (x1, lambda x: x * 2e-8), "mul_scalar_0.1": (x1, lambda x: x * 0.1), "mul_scalar_1e6": (x1, lambda x: x * 1e6),
    "mul_scalar_half": (x1, lambda x: x * 0.5),
    "div_scalar_1048576": (x1, lambda x: x / 1048576), "div_scalar_3": (x1, lambda x: x / 3), "div_scalar_1e-8": (x1, lambda x: x / 1e-8),
    "add_scalar_1e-9": (x1, lambda x: x + 1e-9), "add_scalar_0.1": (x1, lambda x: x + 0.1), "sub_scalar_100000": (x1, lambda x: x - 100000.0),
    "sub_scalar_0.1": (x1, lambda x: x - 0.1), "rsub_scalar": (x1, lambda x: 0.1 - x),
    "clamp": (x1, lambda x: x.clamp(-0.1, 60000.0)), "clamp_min": (x1, lambda x: x.clamp_min(1e-9)), "clamp_max": (x1, lambda x: x.clamp_max(0.1)),
    "remainder_scalar": (["unit"], lambda x: torch.remainder(x, 0.1)),
    "greater_elem": (x1, lambda x: (x > 1e-9) * 1.0), "lower_elem": (x1, lambda x: (x < 0.3000001) * 1.0),
    "greater_equal_elem": (x1, lambda x: (x >= 0.29998) * 1.0), "lower_equal_elem": (x1, lambda x: (x <= -100000.0) * 1.0),
    "equal_elem": (x1, lambda x: (x == 0.3) * 1.0), "not_equal_elem": (x1, lambda x: (x != 0.1) * 1.0),
    "mask_fill": (x1, lambda x: x.masked_fill(x > 1, 0.1)),
    # FloatTensorOps, two operands
    "add": (PAIR, torch.add), "sub": (PAIR, torch.sub), "mul": (PAIR, torch.mul), "div": (PAIR, torch.div),
    "atan2": (PAIR, torch.atan2), 
    # The gradient of a tie goes to the first operand; PyTorch's maximum halves it.
    "max_pair": (PAIR, lambda a, b: torch.where(a < b, b, a)), "min_pair": (PAIR, lambda a, b: torch.where(a > b, b, a)),
    "comparisons": (PAIR, lambda a, b: (a == b) * 1.0 + (a != b) * 2.0 + (a > b) * 4.0 + (a >= b) * 8.0 + (a < b) * 16.0 + (a <= b) * 32.0),
    "powi": (POS, f32(lambda x: x ** (torch.arange(x.shape[1]) % 4))),
    "mask_where": (PAIR, lambda a, b: torch.where(a > b, a, b)), "powf": (["positive", "exponents"], f32(torch.pow)),
    "remainder": (["unit", "unit"], lambda a, b: torch.remainder(a, b.flip(1))),
    "cross": (["rows", "other_rows"], lambda a, b: torch.linalg.cross(a[:, :3], b[:, :3])),
    "cross_of_other_scales": (["rows", "shuffled_rows"], lambda a, b: torch.linalg.cross(a[:, :3], b[:, :3])),
    "add_broadcast": (["rows", "moderate"], lambda a, b: a[:, :4] + b[:1]),
    "mul_broadcast": (["rows", "moderate"], lambda a, b: a[:, :4] * b[:1]),
    "div_broadcast": (["rows", "moderate"], lambda a, b: a[:, :4] / b[:1]),
    "bias_of_4096": (["ones", "moderate"], lambda a, b: a.reshape(-1, 1) + b[:1, :1]),
    "hypot": (PAIR, None),
    # reductions and scans
    "sum": (["rows"], f32(lambda x: x.sum())), "sum_dim": (["rows"], f32(lambda x: x.sum(1))),
    "mean": (["rows"], f32(lambda x: x.mean())), "mean_dim": (["rows"], f32(lambda x: x.mean(1))), "mean_of_4096": (["ones"], f32(lambda x: x.mean())),
    "prod": (["moderate"], f32(lambda x: x.prod())), "prod_dim": (["rows"], f32(lambda x: x.prod(1))),
    "cumsum": (["rows"], f32(lambda x: x.cumsum(1))), "cumprod": (["rows"], f32(lambda x: x.cumprod(1))),
    "cummax": (["rows"], lambda x: x.cummax(1).values), "cummin": (["rows"], lambda x: x.cummin(1).values),
    "max": (["rows"], lambda x: x.max()), "min": (["rows"], lambda x: x.min()),
    "max_dim": (["rows"], lambda x: x.max(1).values), "min_dim": (["rows"], lambda x: x.min(1).values), "max_abs": (["rows"], lambda x: x.abs().max()),
    "max_abs_dim": (["rows"], lambda x: x.abs().max(1).values),
    "sort": (["rows"], weighted(lambda x: x.sort(1).values)), "topk": (["rows"], weighted(lambda x: x.topk(3, 1).values)),
    "var": (["rows"], f32(lambda x: x.var(1))), "std": (["rows"], f32(lambda x: x.std(1))),
    # views and moves
    "slice": (["rows"], lambda x: x[:, 1:3]), "gather": (["rows"], lambda x: x.gather(1, torch.tensor([[0, 2, 2]] * x.shape[0]))),
    "select": (["rows"], lambda x: x.index_select(1, torch.tensor([3, 0, 3]))),
    "repeat": (["rows"], lambda x: x.repeat(1, 3)), "expand": (["moderate"], lambda x: x[:1].expand(2048, 4)),
    "cat": (["rows", "other_rows"], lambda a, b: torch.cat([a, b], 1)),
    "scatter_add": (["rows", "other_rows"], lambda a, b: a.scatter_add(1, torch.tensor([[0, 1, 1, 1, 2, 5]] * a.shape[0]), b)),
    "select_add": (["rows", "other_rows"], lambda a, b: a.index_add(1, torch.tensor([0, 1, 2, 3, 4, 4]), b)),
    "slice_assign": (["rows", "other_rows"], lambda a, b: torch.cat([b[:, :2], a[:, 2:]], 1)),
    "flip": (["rows"], lambda x: x.flip(1)), "permute": (["rows"], lambda x: x.permute(1, 0)), "swap_dims": (["rows"], lambda x: x.swapdims(0, 1)),
    "gather_nd": (["rows"], lambda x: x[[1, 1, 0]]),
    "scatter_nd": (["rows", "other_rows"], lambda a, b: a.index_add(0, torch.tensor([0, 2]), b[:2])),
    "unfold": (["rows"], lambda x: x.unfold(1, 3, 1)),
    # activations
    "relu": (x1, F.relu), "leaky_relu": (x1, lambda x: F.leaky_relu(x, 0.01)), "gelu": (x1, F.gelu), "gelu_approximate": (x1, lambda x: F.gelu(x, approximate="tanh")),
    "sigmoid": (x1, torch.sigmoid), "hard_sigmoid": (x1, F.hardsigmoid), "log_sigmoid": (x1, f32(F.logsigmoid)),
    "silu": (x1, F.silu), "mish": (x1, F.mish), "softplus": (x1, f32(F.softplus)), "softplus_beta": (x1, f32(lambda x: F.softplus(x, 0.3, 1e30))),
    "hard_swish": (x1, F.hardswish), "elu": (x1, F.elu), "celu": (x1, lambda x: F.celu(x, 0.7)), "selu": (x1, F.selu),
    "softsign": (x1, F.softsign), "hard_shrink": (x1, lambda x: F.hardshrink(x, 0.1)), "soft_shrink": (x1, lambda x: F.softshrink(x, 0.1)),
    "thresholded_relu": (x1, lambda x: F.threshold(x, 0.1, 0.0)), "prelu": (x1, lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype))),
    "glu": (["signed", "gates"], lambda a, b: F.glu(torch.cat([a, b]), 0)[None]),
    "softmax": (["rows"], weighted(f32(lambda x: x.softmax(1)))), "log_softmax": (["rows"], weighted(f32(lambda x: x.log_softmax(1)))),
    "softmin": (["rows"], weighted(f32(lambda x: F.softmin(x, 1)))),
    "quiet_softmax": (["rows"], None),
    # losses of burn-nn
    "huber": (PAIR, f32(lambda a, b: F.huber_loss(a, b, reduction="none"))), "huber_delta": (PAIR, f32(lambda a, b: F.huber_loss(a, b, reduction="none", delta=300.0))),
    "smooth_l1": (PAIR, f32(lambda a, b: F.smooth_l1_loss(a, b, reduction="none"))), "smooth_l1_beta": (PAIR, f32(lambda a, b: F.smooth_l1_loss(a, b, reduction="none", beta=0.3))),
    "mse": (PAIR, f32(lambda a, b: F.mse_loss(a, b, reduction="none"))), "lp_loss_1": (PAIR, f32(lambda a, b: F.l1_loss(a, b, reduction="sum"))),
    "lp_loss_2": (PAIR, f32(lambda a, b: F.mse_loss(a, b, reduction="sum") / 1e3)),
    "lp_loss_3": (["rows", "other_rows"], f32(lambda a, b: (a - b).abs() ** 3)),
    "bce": (["probabilities"], f32(lambda p: F.binary_cross_entropy(p, torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0]], dtype=p.dtype), reduction="sum"))),
    "bce_with_logits": (["far_logits", "far_targets"], f32(lambda x, t: F.binary_cross_entropy_with_logits(x, t.detach(), reduction="sum"))),
    "bce_of_sigmoid": (["logits", "targets"], bce_of_sigmoid),
    "kl_div": (["small_logits", "soft_targets"], f32(lambda x, t: F.kl_div(x, t.detach(), reduction="none"))),
    "kl_div_log": (["small_logits", "small_logits"], f32(lambda x, t: F.kl_div(x, t.flip(1).detach(), reduction="none", log_target=True))),
    "poisson": (["small_logits", "counts"], f32(lambda x, t: F.poisson_nll_loss(x, t.detach(), reduction="none"))),
    "poisson_full": (["probabilities", "counts"], f32(lambda x, t: F.poisson_nll_loss(x, t.detach(), log_input=False, full=True, reduction="none"))),
    "cross_entropy": (["rows"], f32(cross_entropy)),
    "ctc": (["moderate"], f32(lambda x: F.ctc_loss(x.log_softmax(1)[:, None], torch.tensor([[1, 2]]), [4], [2], reduction="sum"))),
    "rnnt": (["moderate"], f32(rnnt)),
    "cosine_embedding": (["rows_above_epsilon", "other_rows_above_epsilon"], f32(cosine_embedding)),
    # linalg
    "l1_norm": (["rows"], norm(1)), "l2_norm": (["rows"], norm(2)), "lp_norm_3": (["rows"], norm(3)), "lp_norm_4": (["rows"], norm(4)),
    "l2_norm_of_tiny": (["tiny_rows"], norm(2)), "lp_norm_3_of_tiny": (["tiny_rows"], norm(3)), "lp_norm_4_of_tiny": (["tiny_rows"], norm(4)),
    "normalize_tiny": (["tiny_rows"], weighted(f32(lambda x: F.normalize(x, dim=1, eps=1e-12)))),
    "max_abs_norm": (["rows"], lambda x: x.abs().max(1).values), "min_abs_norm": (["rows"], lambda x: x.abs().min(1).values),
    "vector_normalize": (["rows"], weighted(f32(lambda x: F.normalize(x, dim=1, eps=1e-12)))),
    "cosine_similarity": (["rows_above_epsilon", "other_rows_above_epsilon"], f32(cosine_similarity)),
    "outer": (["moderate"], lambda x: torch.outer(x[0], x[1])), "dot": (["large"], lambda x: torch.dot(x[0] / 256, x[1])),
    "det_2": (["regular"], corner_of(2, torch.linalg.det)), "det_3": (["regular"], corner_of(3, torch.linalg.det)),
    "det_4": (["regular"], f32(torch.linalg.det)), "lu": (["regular"], weighted(f32(lu))), "trace": (["regular"], f32(torch.trace)),
    # norms of burn-nn
    "rms_norm": (["rows"], weighted(f32(rms_norm))), "layer_norm": (["rows"], weighted(f32(lambda x: F.layer_norm(x, (6,), eps=1e-5)))),
    "group_norm": (["rows"], weighted(f32(group_norm))), "instance_norm": (["rows"], weighted(f32(instance_norm))),
    "local_response_norm": (["rows"], weighted(f32(lambda x: F.local_response_norm(x[:, :, None], 5)[:, :, 0]))),
    "batch_norm": (["rows"], lambda x: batch_norm(x) * torch.arange(1, x.shape[0] + 1, dtype=x.dtype)[:, None]),
    # ModuleOps
    "matmul": (["moderate", "moderate"], lambda a, b: a @ b.T), "matmul_large": (["large", "moderate"], lambda a, b: a @ b.T),
    "linear": (["moderate", "moderate"], lambda a, b: F.linear(a, b, b[0])),
    "conv1d": (["moderate", "moderate"], lambda a, b: F.conv1d(a[:, None], b[:2, None, :3])[:, 1]),
    "conv2d": (["moderate", "moderate"], lambda a, b: F.conv2d(a[None, None], b[None, None, :2, :2])[0, 0]),
    "conv3d": (["moderate", "moderate"], lambda a, b: F.conv3d(a.reshape(1, 1, 2, 2, 4), b[:2].reshape(1, 1, 2, 2, 2)).reshape(1, 3)),
    "conv_transpose1d": (["moderate", "moderate"], lambda a, b: F.conv_transpose1d(a[:, None], b[:1, None, :3])[:, 0]),
    "conv_transpose2d": (["moderate", "moderate"], lambda a, b: F.conv_transpose2d(a[None, None], b[None, None, :2, :2])[0, 0]),
    "conv_transpose3d": (["moderate", "moderate"], lambda a, b: F.conv_transpose3d(a.reshape(1, 1, 2, 2, 4), b[:2].reshape(1, 1, 2, 2, 2)).reshape(9, 5)),
    "avg_pool2d": (["moderate"], f32(lambda x: F.avg_pool2d(x[None, None], 2, 1)[0, 0])),
    "avg_pool1d": (["moderate"], f32(lambda x: F.avg_pool1d(x[None], 2, 1)[0])),
    "adaptive_avg_pool1d": (["moderate"], f32(lambda x: F.adaptive_avg_pool1d(x[None], 3)[0])),
    "adaptive_avg_pool2d": (["moderate"], f32(lambda x: F.adaptive_avg_pool2d(x[None, None], 3)[0, 0])),
    "max_pool1d": (["rows"], lambda x: F.max_pool1d(x[None], 2, 1)[0]),
    "max_pool2d": (["rows"], lambda x: F.max_pool2d(x[None, None], 2, 1)[0, 0]),
    "interpolate": (["moderate"], f32(lambda x: F.interpolate(x[None, None], (7, 7), mode="bilinear", align_corners=True)[0, 0])),
    "grid_sample_2d": (["moderate", "moderate"], f32(lambda a, b: F.grid_sample(a[None, None], b.reshape(1, 2, 4, 2), align_corners=False)[0, 0])),
    "unfold4d": (["moderate"], lambda x: F.unfold(x[None, None], 2)[0]),
    "attention": (["moderate", "moderate", "moderate"], attention),
    "embedding": (["rows"], lambda x: F.embedding(torch.tensor([0, 2, 2, 1]), x)),
}


def hypot(a, b):
    return (a * a + b * b).sqrt()


def quiet_softmax(x):
    top = x.detach().max(1, keepdim=True).values
    e = (x - top).exp()
    return e / (e.sum(1, keepdim=True) + (-top).exp())


#: What PyTorch has no operation for: f32, rounded once. Burn's users write it from operations, so PyTorch's users do so too.
COMPOSED = {"hypot": f32(hypot), "quiet_softmax": weighted(f32(quiet_softmax))}


def evaluate(function, operands):
    operands = [x.detach().clone().requires_grad_() for x in operands]
    result = function(*operands)
    total = result.double().sum()
    if total.requires_grad:
        total.backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in operands]
    return [x.detach().double().reshape(-1).tolist() for x in (result, *gradients)]


def numbers(values):
    return " ".join(f"{x:.6g}" for x in values)


def errors(found, exact):
    differences = (abs(a - b) for a, b in zip(found, exact))
    return " ".join(f"{x:.1g}" if math.isfinite(x) else "inf" for x in differences)


def main():
    print("# Written by numerics.py: do not edit.", file=out)
    for dtype, label in ((torch.float16, "f16"), (torch.bfloat16, "bf16")):
        global EPSILON
        EPSILON = torch.finfo(dtype).tiny
        values = grids(dtype)
        for name, grid in values.items():
            print(f"grid {label} {name} {grid.shape[0]} {grid.shape[1]}", file=out)
            print(numbers(grid.double().reshape(-1).tolist()), file=out)
        for name, (operands, function) in CASES.items():
            function = function or COMPOSED[name]
            tensors = [values[x] for x in operands]
            print(f"case {name} {label} {' '.join(operands)}", file=out)
            truth = evaluate(function, [x.double() for x in tensors])
            try:
                found = evaluate(function, tensors)
            except RuntimeError as error:
                # A kernel that PyTorch has on CUDA only: f32, rounded once.
                print(label, name, error, file=sys.stderr)
                found = [torch.tensor(x).to(dtype).double().tolist() for x in evaluate(function, [x.float() for x in tensors])]
            for exact, low in zip(truth, found):
                print(numbers(exact), file=out)
                print(errors(low, exact), file=out)


if __name__ == "__main__":
    with open(sys.argv[1], "w") as out:
        main()
