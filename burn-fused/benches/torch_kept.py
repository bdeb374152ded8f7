"""PyTorch's side of tests/tests/llama_block.rs: what a Llama block and its parts save for backward.

    python3 torch_kept.py        # with torch and transformers

A block of SmolLM2-135M's sizes on 2 sequences of 256 tokens in f32, as transformers has it, with attention by `scaled_dot_product_attention`. Counted are
the sizes of what `saved_tensors_hooks` sees, each storage once; parameters, and what all blocks share (sine and cosine), are not counted.
"""

import torch
from torch.nn.functional import rms_norm, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

BATCH, TIME, WIDTH, HEADS, HEAD_WIDTH = 2, 256, 576, 9, 64


def saved_bytes(run, *shared):
    """Of what `run` saves, without these tensors."""
    known = {tensor.untyped_storage().data_ptr() for tensor in shared}
    storages, tensors = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
            tensors.append(tensor)  # so that no later one has its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storages.values())


def main():
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=1536, num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=3,
        rms_norm_eps=1e-5, vocab_size=16, attn_implementation="sdpa",
    )
    layer, rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
    x = torch.randn(BATCH, TIME, WIDTH, requires_grad=True) * 1.5
    cos, sin = rotary(x, torch.arange(TIME)[None])
    shared = [cos, sin, *layer.parameters()]
    block = saved_bytes(lambda: layer(x, position_embeddings=(cos, sin)), *shared)
    print(f"torch {torch.__version__}: a block saves {block / 2**20:.2f} MiB")

    heads = torch.randn(BATCH, HEADS, TIME, HEAD_WIDTH, requires_grad=True) * 1.5
    gate, norm = heads * 0.5, LlamaRMSNorm(HEAD_WIDTH)
    parts = {
        "silu": lambda: silu(heads),
        "silu(gate) * up": lambda: silu(gate) * heads,
        "rms_norm of torch": lambda: rms_norm(heads, [HEAD_WIDTH], norm.weight),
        "LlamaRMSNorm": lambda: norm(heads),
        "rotary embedding": lambda: apply_rotary_pos_emb(heads, heads, cos, sin)[0],
    }
    for name, run in parts.items():
        tensors = saved_bytes(run, cos, sin, norm.weight) / (4 * heads.numel())
        print(f"{name} saves {tensors:.2f} tensors")


if __name__ == "__main__":
    main()
