"""Small language models of the families that `examples::llm` reads, with random weights, and what transformers makes of them.

    pip install torch==2.9.0 transformers safetensors
    python3 golden.py

writes a Hugging Face directory for each, with `reference.json` (tokens, loss, norms of gradients before clipping) and
`reference.safetensors` (logits, and the gradient of every parameter). Written by transformers 5.24.0.
"""
import json, pathlib
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3)
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
MODELS = {
    "llama": LlamaConfig(**SIZES, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "llama_biased": LlamaConfig(**SIZES, rms_norm_eps=1e-6, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, rms_norm_eps=1e-5, sliding_window=None, tie_word_embeddings=False,
                             rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
    "qwen2": Qwen2Config(**SIZES, rms_norm_eps=1e-6, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, rms_norm_eps=1e-6, head_dim=6, tie_word_embeddings=False),
}

for number, (name, config) in enumerate(MODELS.items()):
    torch.manual_seed(number)
    folder = pathlib.Path(__file__).parent / name
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path or path.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    # The weights of one model lie in two files, as those of large models do.
    model.save_pretrained(folder, max_shard_size="12KB" if name == "mistral" else "1GB")
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 24))
    output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    tensors = {path: parameter.grad.contiguous() for path, parameter in model.named_parameters()}
    save_file({**tensors, "logits": output.logits.detach().contiguous()}, folder / "reference.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)
    reference = dict(tokens=tokens.flatten().tolist(), loss=output.loss.item(), gradient_norm=norm.item(),
                     parameters=sum(parameter.numel() for parameter in model.parameters()))
    (folder / "reference.json").write_text(json.dumps(reference) + "\n")
