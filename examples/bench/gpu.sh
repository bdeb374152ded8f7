#!/usr/bin/env bash
# Everything about speed and memory on a GPU in one call of less than 9 minutes, without cargo:
#
#     examples/bench/gpu.sh BINARY [OUT_DIR [BENCH OPTIONS..]]
#
# BINARY is the bench example, built elsewhere for the backend:
#
#     cargo build --release -p examples --features cuda --example bench
#     strip -o bench-cuda target/release/examples/bench
#
# Bench options come after `--backend cuda --preset gpt2` and count more; e.g. to try this script where there is no GPU:
#
#     examples/bench/gpu.sh BINARY out --backend vulkan --preset small --steps 3
#
# OUT_DIR (default: bench-results) gets timing.json (the settings side by side), timing.svg, memory.json (each setting in a
# process of its own), torch.json (the same model in PyTorch, where python3 has it), table.md, machine.txt and logs.
#
# WHAT=activations in the environment compares ways to hold activations in place of precisions, and in place of memory.json
# there is fit.json: the largest batch of each that fits into FIT_MIB (default: 40000), parameters and all, beside budgets of
# BUDGET_MIB (default: 30000) and half of it.
#
# WHAT=backends tells backend, autocast and recomputation apart: timing.json and one-stream.json are bf16 and blocks that are
# recomputed, with CubeCL's many streams and with `max_streams = 1`; and tch.json is the same on LibTorch with PyTorch taking its
# steps in the same rounds, where BINARY has the feature `tch` too and python3 has PyTorch 2.9.
set -uo pipefail

what=${WHAT:-precisions}
case $what in
precisions | activations | backends) ;;
*)
    echo "error: WHAT is $what; it can be precisions, activations or backends" >&2
    exit 2
    ;;
esac
fit_mib=${FIT_MIB:-40000}
budget_mib=${BUDGET_MIB:-30000}

if [[ ! -x ${1:-} ]]; then
    echo "usage: gpu.sh BINARY [OUT_DIR [BENCH OPTIONS..]]" >&2
    exit 2
fi
binary=$(realpath -- "$1")
mkdir -p -- "${2:-bench-results}"
out=$(realpath -- "${2:-bench-results}")
shift $(($# < 2 ? $# : 2))
options=(--backend cuda --preset gpt2 "$@")
torch_gpt=$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/torch_gpt.py

# Seconds. A part is asked to end by the first, and made to by the second: 250 + 170 + 90 = 510, or three times 170.
timing=(210 250)
memory=(130 170)
torch=90
[[ $what == backends ]] && timing=("${memory[@]}")

# CubeCL takes CUDA's headers from CUDA_PATH, and loads NVRTC as any library.
if [[ -z ${CUDA_PATH:-} ]] && nvcc=$(command -v nvcc); then
    CUDA_PATH=$(dirname -- "$(dirname -- "$(realpath -- "$nvcc")")")
    export CUDA_PATH
fi
if [[ -n ${CUDA_PATH:-} ]]; then
    export LD_LIBRARY_PATH=$CUDA_PATH/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

# CubeCL finds its configuration where it is started: a kernel is compiled, and chosen, once for all processes.
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
cd -- "$work" || exit
cat >cubecl.toml <<END
[compilation]
cache = { file = "$work/kernels" }
[autotune]
cache = { file = "$work/autotune" }
END
mkdir one-stream
cat cubecl.toml - >one-stream/cubecl.toml <<END
[streaming]
max_streams = 1
END

# part NAME SECONDS COMMAND..: a part that fails or takes too long does not stop the others.
failed=0
part() {
    local name=$1 seconds=$2 start=$SECONDS status=0
    shift 2
    echo "== $name: $*" >&2
    timeout --kill-after=5 "$seconds" "$@" > >(tee -- "$out/$name.log") 2> >(tee -- "$out/$name.err" >&2) || status=$?
    echo "== $name took $((SECONDS - start)) s, status $status" >&2
    ((status == 0)) || failed=1
}

rm -f -- "$out"/{timing,memory,fit,torch,one-stream,tch}.json
{
    uname -a
    nvidia-smi 2>&1
    echo "CUDA_PATH=${CUDA_PATH:-}"
    echo "options: ${options[*]}"
} >"$out/machine.txt"

timing_options=() torch_options=()
case $what in
precisions) settings=bare,off,bf16,f16 ;;
backends) settings=bare,bf16,block,bf16+block ;;
activations)
    settings=bare,balanced,off,block,keep-compute,offload,budget=60%,budget=40%,budget=25%
    # A budget's training has pools of its own, beside those of all others.
    timing_options=(--batch 4)
    torch_options=(--side-by-side --settings f32,block,keep-compute,offload)
    ;;
esac
part timing "${timing[1]}" "$binary" --settings "$settings" --max-seconds "${timing[0]}" \
    "${timing_options[@]}" "${options[@]}" --output "$out/timing.json" --plot "$out/timing.svg"
case $what in
precisions)
    part memory "${memory[1]}" "$binary" --memory --settings bare,bf16,f16 --steps 3 --warmup 2 \
        --max-seconds "${memory[0]}" "${options[@]}" --output "$out/memory.json"
    ;;
activations)
    part fit "${memory[1]}" "$binary" "${options[@]}" --fit "$fit_mib" --max-seconds "${memory[0]}" --output "$out/fit.json" \
        --settings "bare,block,budget=$budget_mib,budget=$((budget_mib / 2)),keep-compute,balanced,offload"
    ;;
backends)
    cd one-stream
    part one-stream "${timing[1]}" "$binary" --settings "$settings" --max-seconds "${timing[0]}" "${options[@]}" \
        --output "$out/one-stream.json"
    part tch "${timing[1]}" "$binary" --settings "$settings" --max-seconds "${timing[0]}" "${options[@]}" --backend tch \
        --torch "$torch_gpt" --output "$out/tch.json" --plot "$out/tch.svg"
    # Each has these settings: no table of all of them.
    for name in timing one-stream tch; do
        [[ -s $out/$name.json ]] && printf '\n## %s\n\n' "$name" && "$binary" --compare "$out/$name.json"
    done | tee -- "$out/table.md"
    exit "$failed"
    ;;
esac

if ! python3 -c 'import torch' 2>/dev/null; then
    echo "== torch: python3 has none" >&2
elif [[ ! -s $out/timing.json ]]; then
    echo "== torch: no timing.json, which says what to compare with" >&2
else
    # The same model, batch and vocabulary as was measured above.
    mapfile -t workload < <(python3 -c '
import json, sys
for name, value in json.load(open(sys.argv[1]))["workload"].items():
    print(f"--{name}", value, sep="\n")' "$out/timing.json")
    part torch "$torch" python3 "$torch_gpt" "${workload[@]}" "${torch_options[@]}" --output "$out/torch.json"
fi

results=()
for name in timing memory torch; do
    [[ -s $out/$name.json ]] && results+=("$out/$name.json")
done
if ((${#results[@]} == 0)); then
    echo "error: nothing was measured; see $out/*.err" >&2
    exit 1
fi
"$binary" --compare "${results[@]}" | tee -- "$out/table.md"
exit "$failed"
