"""What transformers makes of conversations: rendered by templates, as tokens with those of the answers, and in a few updates of the small llama.

    pip install torch==2.9.0 transformers==5.24.0
    python3 chat.py

reads `chat.jsonl` and writes `chat.json`. In it a template says which text an answer is by the tags of `generation`.
"""
import json, pathlib
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

FOLDER = pathlib.Path(__file__).parent
SETTINGS = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
SPECIAL = dict(bos_token="<s>", eos_token="</s>")
TEMPLATES = {
    "generation": """{% for message in messages %}
    {% if message['role'] == 'user' %}
dog, {{ message['content'].strip() }}
    {% elif message['role'] == 'assistant' %}
fox, {% generation %}{{ message['content'] + '.' }}{% endgeneration %}{{ '\\n' }}
    {% else %}
        {{- raise_exception('there is no ' + message['role']) }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
fox, {% endif %}""",
    "chatml": """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "headers": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}""",
    "turns": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"].strip() + eos_token }}
    {%- endif %}
{%- endfor %}""",
}

tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"))
conversations = []
for line in (FOLDER / "chat.jsonl").read_text().split("\n"):
    if not line:
        continue
    line = json.loads(line)
    pair = lambda: [dict(role="user", content=line["prompt"]), dict(role="assistant", content=line["completion"])]
    conversations.append(line["messages"] if "messages" in line else pair())
with_system = [dict(role="system", content=" a brown 'fox' & <b> ")] + conversations[0]
render = lambda messages, source, **more: tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **SPECIAL, **more)
rendered = {
    name: [render(messages, source) for messages in conversations + [with_system] * (name != "generation")] for name, source in TEMPLATES.items()
}

sequences = []
for messages in conversations:
    encoded = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATES["generation"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    sequences.append(dict(tokens=encoded["input_ids"], counted=[bool(it) for it in encoded["assistant_masks"]]))

model = AutoModelForCausalLM.from_pretrained(FOLDER.parent / "llm/llama", dtype=torch.float32, attn_implementation="eager").train()
optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
losses, norms = [], []
for start in range(0, 6, 2):
    both = sequences[start : start + 2]
    # Each on its own: nothing is filled up, and the mean is over the tokens of both.
    total = sum(sum(sequence["counted"][1:]) for sequence in both)
    update = 0.0
    for sequence in both:
        inputs = torch.tensor([sequence["tokens"]])
        labels = torch.where(torch.tensor([sequence["counted"]]), inputs, -100)
        mean = model(input_ids=inputs, labels=labels).loss
        update = update + mean * sum(sequence["counted"][1:]) / total
    update.backward()
    losses.append(update.item())
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    optimizer.step()
    optimizer.zero_grad()
golden = dict(templates=TEMPLATES, rendered=rendered, with_system=with_system, sequences=sequences, losses=losses, norms=norms)
(FOLDER / "chat.json").write_text(json.dumps(golden, indent=1) + "\n")
