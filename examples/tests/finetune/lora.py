"""What PEFT makes of a few updates of adapters on the small models beside `../llm/golden.py`, on the text of `golden.py`.

    pip install torch==2.9.0 transformers==5.24.0 peft==0.21.2 safetensors
    python3 lora.py                  # writes lora.json and lora/MODEL/{start,trained}: adapters before and after the updates
    python3 lora.py MODEL ADAPTER    # the largest difference of the logits with an adapter that finetune has written, and with
                                     # its merged model in ADAPTER/merged, from those with lora/MODEL/trained
"""
import json, pathlib, sys
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

FOLDER = pathlib.Path(__file__).parent
CONTEXT, BATCH, UPDATES = 16, 2, 5
SETTINGS = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
CONFIGS = {
    "llama": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "qwen3": LoraConfig(r=2, lora_alpha=3, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM"),
}

tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
tokens = torch.tensor(sum((tokenizer.encode((FOLDER / name).read_text()).ids for name in ("one.txt", "two.txt")), []))


def base(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=tokens[: BATCH * CONTEXT].view(BATCH, CONTEXT)).logits


if sys.argv[1:]:
    name, adapter = sys.argv[1], pathlib.Path(sys.argv[2])
    with_adapter = lambda path: logits(PeftModel.from_pretrained(base(FOLDER.parent / "llm" / name), path))
    expected = with_adapter(FOLDER / "lora" / name / "trained")
    print("without adapter", (logits(base(FOLDER.parent / "llm" / name)) - expected).abs().max().item())
    print("adapter", (with_adapter(adapter) - expected).abs().max().item())
    if (adapter / "merged").exists():
        print("merged", (logits(base(adapter / "merged")) - expected).abs().max().item())
    sys.exit()

training = {}
for number, (name, config) in enumerate(CONFIGS.items()):
    torch.manual_seed(number)
    model = get_peft_model(base(FOLDER.parent / "llm" / name), config).train()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_B" in path:  # zero at first: then the first gradient of A would be zero too
                parameter.normal_(std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    losses, norms = [], []
    for step in range(UPDATES + 1):
        if step in (0, UPDATES):
            folder = FOLDER / "lora" / name / ("trained" if step else "start")
            model.peft_config["default"].base_model_name_or_path = name
            model.save_pretrained(folder)
            (folder / "README.md").unlink()
        if step < UPDATES:
            inputs = tokens[step * BATCH * CONTEXT :][: BATCH * CONTEXT].view(BATCH, CONTEXT)
            loss = model(input_ids=inputs, labels=inputs).loss
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    training[name] = dict(losses=losses, norms=norms, parameters=trained)
(FOLDER / "lora.json").write_text(json.dumps(training) + "\n")
