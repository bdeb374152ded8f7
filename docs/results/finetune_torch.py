"""The updates of `finetune` by transformers and PEFT, with the options of `finetune`: losses, gradient norms, what each part of
an update takes, the peak of the process.

    pip install torch==2.9.0 transformers==5.24.0 peft==0.21.2
    python3 finetune_torch.py --model DIR --text FILE --output OUT.json
    python3 finetune_torch.py --model DIR --text FILE --lora-rank 8 --start START --output OUT.json    # new adapters, written as PEFT draws them
    finetune --model DIR --text FILE --adapter START --packing plain --no-shuffle --schedule constant  # the same updates

The text is packed plainly, the order is that of the text, and the learning rate is constant. AdamW is PyTorch's fused one, which
transformers' Trainer takes by default, or with `--optimizer plain` the one that `torch.optim.AdamW` is without options on a CPU.
"""

import argparse
import json
import resource
import time

import torch
import transformers

arguments = argparse.ArgumentParser()
arguments.add_argument("--model", required=True)
arguments.add_argument("--text", nargs="+", required=True)
arguments.add_argument("--output", required=True)
arguments.add_argument("--context", type=int, default=256)
arguments.add_argument("--batch", type=int, default=2)
arguments.add_argument("--steps", type=int, default=4)
arguments.add_argument("--lr", type=float, default=1e-4)
arguments.add_argument("--beta-2", type=float, default=0.999)
arguments.add_argument("--weight-decay", type=float, default=0.01)
arguments.add_argument("--amp", choices=["off", "bf16"], default="off")
arguments.add_argument("--checkpoint", choices=["none", "block"], default="none")
arguments.add_argument("--optimizer", choices=["fused", "plain"], default="fused")
arguments.add_argument("--lora-rank", type=int)
arguments.add_argument("--start", help="directory for the new adapters")
options = arguments.parse_args()


def resident(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
text = sum((tokenizer(open(file).read()).input_ids for file in options.text), [])
tokens = options.steps * options.batch * options.context
text = torch.tensor((text * (1 + tokens // len(text)))[:tokens]).view(options.steps, options.batch, options.context)
imports_bytes = resident("VmRSS")

model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
if options.lora_rank:
    import peft

    torch.manual_seed(42)
    config = peft.LoraConfig(r=options.lora_rank, lora_alpha=2 * options.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    model.save_pretrained(options.start)
if options.checkpoint == "block":
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
model.train()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(
    trained,
    lr=options.lr,
    betas=(0.9, options.beta_2),
    weight_decay=options.weight_decay,
    fused=options.optimizer == "fused",
)
parts = {"forward": [], "backward": [], "clip": [], "optimizer": []}
losses, norms, seconds = [], [], []
for inputs in text:
    marks = [time.perf_counter()]
    with torch.autocast("cpu", torch.bfloat16, enabled=options.amp == "bf16"):
        loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
    losses.append(loss.item())
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    norms.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
    marks.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    marks.append(time.perf_counter())
    for part, begin, end in zip(parts.values(), marks, marks[1:]):
        part.append(end - begin)
    seconds.append(marks[-1] - marks[0])

report = dict(
    losses=losses,
    gradient_norms=norms,
    update_seconds=seconds,
    parts_seconds=parts,
    # Of the interpreter with its modules, before there is a model.
    imports_bytes=imports_bytes,
    peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    parameters=sum(parameter.numel() for parameter in trained),
    torch=torch.__version__,
    transformers=transformers.__version__,
    options=vars(options),
)
with open(options.output, "w") as file:
    json.dump(report, file)
print(options.amp, options.checkpoint, "losses", *(f"{loss:.4f}" for loss in losses))
print("seconds", *(f"{second:.2f}" for second in seconds), "peak MiB", report["peak_bytes"] >> 20)
