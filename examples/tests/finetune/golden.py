"""What transformers makes of a few updates of the small models beside `../llm/golden.py`, on text that a tokenizer of 40 tokens cuts.

    pip install torch==2.9.0 transformers safetensors
    python3 golden.py

writes `tokenizer.json` and `training.json`: tokens, and for each model and packing the losses and norms of gradients of every update.
Written by transformers 5.24.0.
"""
import json, pathlib
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

FOLDER = pathlib.Path(__file__).parent
CONTEXT, BATCH, UPDATES = 16, 2, 5
SETTINGS = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

files = [FOLDER / name for name in ("one.txt", "two.txt")]
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.train([str(file) for file in files], trainers.BpeTrainer(vocab_size=40, show_progress=False))
tokenizer.save(str(FOLDER / "tokenizer.json"))

documents = [tokenizer.encode(file.read_text()).ids for file in files]
tokens = torch.tensor(sum(documents, []))
begins = {0, len(documents[0])}
numbers = torch.tensor([number for number, document in enumerate(documents) for _ in document])


def update(model, optimizer, start, packing):
    """One update on the sequences from the token `start` on."""
    span = slice(start, start + BATCH * CONTEXT)
    inputs = tokens[span].view(BATCH, CONTEXT)
    labels = inputs.clone()
    more = {}
    if packing == "documents":
        of_document = numbers[span].view(BATCH, CONTEXT)
        positions = torch.zeros_like(inputs)
        for row in range(BATCH):
            for column in range(1, CONTEXT):
                begin = start + row * CONTEXT + column in begins
                positions[row, column] = 0 if begin else positions[row, column - 1] + 1
                if begin:
                    labels[row, column] = -100
        same = of_document[:, None, :, None] == of_document[:, None, None, :]
        seen = same & torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
        more = dict(position_ids=positions, attention_mask=torch.where(seen, 0.0, torch.finfo(torch.float32).min))
    loss = model(input_ids=inputs, labels=labels, **more).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


training = {}
for name in ("llama", "qwen3"):
    for packing in ("plain", "documents"):
        model = AutoModelForCausalLM.from_pretrained(FOLDER.parent / "llm" / name, dtype=torch.float32, attn_implementation="eager").train()
        optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
        steps = [update(model, optimizer, number * BATCH * CONTEXT, packing) for number in range(UPDATES)]
        losses, norms = zip(*steps)
        training[f"{name} {packing}"] = dict(losses=losses, norms=norms)
training["tokens"] = documents
(FOLDER / "training.json").write_text(json.dumps(training) + "\n")
