"""`finetune` beside transformers: updates of the same model on the same text, each program and setting in a process of its own, one after
the other in each round.

    python3 finetune_rounds.py FINETUNE PYTHON MODEL TEXT.. --programs transformers,tch,flex --settings f32,f32+block --output OUT.json
    python3 finetune_rounds.py --table OUT.json

FINETUNE is the release build with LibTorch, PYTHON has torch and transformers. Prints seconds an update (the median of a process without its
first update; of these the median, least and most over the rounds), the ratio to transformers in the same round, and the largest peak of the process.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile


def command(options, program, setting, text, valid, output):
    common = ["--model", options.model, "--context", str(options.context), "--batch", str(options.batch), "--steps", str(options.steps), "--lr", "1e-4"]
    common += ["--amp", "bf16" if setting.startswith("bf16") else "off", "--checkpoint", "block" if setting.endswith("+block") else "none"]
    if program == "transformers":
        script = str(pathlib.Path(__file__).parent / "finetune_torch.py")
        return [options.python, script, *common, "--text", *text, "--output", f"{output}/report.json"], f"{output}/report.json"
    more = ["--backend", program, "--packing", "plain", "--no-shuffle", "--schedule", "constant", "--valid", valid]
    return [options.finetune, *common, *more, "--text", *text, "--output", output], f"{output}/report.json"


def run(options):
    records = []
    with tempfile.TemporaryDirectory() as folder:
        valid = f"{folder}/valid.txt"
        # One sequence: a validation is no part of an update.
        with open(valid, "w") as file:
            file.write(open(options.text[0]).read()[: 6 * options.context])
        for number in range(options.rounds):
            for setting in options.settings.split(","):
                for program in options.programs.split(","):
                    arguments, report = command(options, program, setting, options.text, valid, f"{folder}/output-{program}")
                    os.makedirs(f"{folder}/output-{program}", exist_ok=True)
                    environment = dict(os.environ, HF_HUB_OFFLINE="1")
                    subprocess.run(arguments, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    found = json.load(open(report))
                    kept = {key: found[key] for key in ("losses", "gradient_norms", "update_seconds", "peak_bytes")}
                    kept |= {key: found[key] for key in ("parts_seconds", "imports_bytes") if key in found}
                    records.append(dict(round=number, setting=setting, program=program, **kept))
                    print(number, setting, program, *(f"{seconds:.2f}" for seconds in found["update_seconds"]), file=sys.stderr, flush=True)
                    # What was measured is kept when the time for more is over.
                    json.dump(records, open(options.output, "w"), indent=1)
    return records


def table(records):
    seconds = {}
    for record in records:
        of_process = statistics.median(record["update_seconds"][1:])
        seconds[record["setting"], record["program"], record["round"]] = of_process
    print("| setting | program | s an update | / transformers | peak, MiB | / transformers |")
    print("|---|---|---:|---:|---:|---:|")
    for setting in dict.fromkeys(record["setting"] for record in records):
        peak = lambda of: max((r["peak_bytes"] for r in records if (r["setting"], r["program"]) == (setting, of)), default=None)
        for program in dict.fromkeys(record["program"] for record in records):
            rounds = [number for of, by, number in seconds if (of, by) == (setting, program)]
            if not rounds:
                continue
            own = [seconds[setting, program, number] for number in rounds]
            ratios = [
                seconds[setting, program, number] / seconds[setting, "transformers", number]
                for number in rounds
                if (setting, "transformers", number) in seconds
            ]
            time = f"{statistics.median(own):.2f} ({min(own):.2f} to {max(own):.2f})"
            ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
            theirs = peak("transformers")
            of_peak = f"{peak(program) / theirs:.2f}" if theirs else ""
            print(f"| {setting} | {program} | {time} | {ratio} | {peak(program) >> 20:,} | {of_peak} |")


if sys.argv[1:2] == ["--table"]:
    table(json.load(open(sys.argv[2])))
    sys.exit()
arguments = argparse.ArgumentParser()
arguments.add_argument("finetune")
arguments.add_argument("python")
arguments.add_argument("model")
arguments.add_argument("text", nargs="+")
arguments.add_argument("--programs", default="transformers,tch,flex")
arguments.add_argument("--settings", default="f32,f32+block,bf16,bf16+block")
arguments.add_argument("--rounds", type=int, default=3)
arguments.add_argument("--steps", type=int, default=3)
arguments.add_argument("--context", type=int, default=256)
arguments.add_argument("--batch", type=int, default=2)
arguments.add_argument("--output", required=True)
table(run(arguments.parse_args()))
