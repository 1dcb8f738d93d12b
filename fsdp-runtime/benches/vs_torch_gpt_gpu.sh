#!/usr/bin/env bash
# GPT pretraining on one GPU, in PyTorch (`fully_shard`) and here (FULL_SHARD), in turns in one run:
# 1.3B in bf16, and 6.7B in bf16 with offload and recomputation. Prints word pieces per second, medians
# over all rounds, and the most memory that each process had on the GPU.
#
#   PYTHON=venv/bin/python fsdp-runtime/benches/vs_torch_gpt_gpu.sh
#
# ROUNDS (3), UPDATES (10), BATCH (8, of the 1.3B run) and ARCHS ("1.3B 6.7B") may be set; GPT names a
# built example. Nothing else may use the GPU. The 6.7B runs take 130 GB of the host's memory.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
rounds=${ROUNDS:-3}
updates=${UPDATES:-10}
command -v nvidia-smi >/dev/null || { echo "no GPU: nvidia-smi was not found" >&2; exit 1; }
"$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null ||
  { echo "no torch with CUDA in $python: pip install torch, or set PYTHON to one that has it" >&2; exit 1; }
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

gpt=${GPT:-}
if [ -z "$gpt" ]; then
  cargo build -q --release --features cuda --example gpt_pretrain
  gpt=${CARGO_TARGET_DIR:-target}/release/examples/gpt_pretrain
fi

# Runs a command whose last line is JSON, and notes the most MiB in use on GPU 0 meanwhile.
watched() {
  local name=$1
  shift
  nvidia-smi --id=0 --query-gpu=memory.used --format=csv,noheader,nounits -lms 50 >"$results/smi" &
  local smi=$!
  "$@" | tail -n 1 >>"$results/$name.json" || true
  kill "$smi"
  wait "$smi" 2>/dev/null || true
  sort -n "$results/smi" | tail -n 1 >>"$results/$name.memory"
}

ours() {
  "$gpt" --device cuda --world-size 1 --engine local --max-update "$updates" --max-valid-steps 1 \
    --json --quiet "$@"
}
theirs() {
  RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29519 \
    "$python" fsdp-runtime/benches/torch_gpt.py --max-update "$updates" "$@"
}

for ((round = 1; round <= rounds; round++)); do
  for arch in ${ARCHS:-1.3B 6.7B}; do
    echo "round $round of $rounds, $arch" >&2
    flags=(--arch "$arch" --bf16 --tokens-per-sample 2048)
    if [ "$arch" = 6.7B ]; then
      flags+=(--cpu-offload --checkpoint-activations --batch-size 1)
    else
      flags+=(--batch-size "${BATCH:-8}")
    fi
    watched "ours-$arch" ours "${flags[@]}"
    watched "torch-$arch" theirs "${flags[@]}"
  done
done
nvidia-smi --id=0 --query-gpu=name,driver_version --format=csv,noheader
"$python" - "$results" <<'PY'
import json, pathlib, statistics, sys
for file in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    lines = [line for line in file.read_text().splitlines() if line.startswith("{")]
    memory = max(map(float, file.with_suffix(".memory").read_text().split()), default=0)
    if not lines:
        print(f"{file.stem:12} no result; {memory:.0f} MiB in use")
        continue
    def rate(run):
        if "updates" not in run:
            return run["words_per_second"]
        # As PyTorch's: of the median update, of which the first compiles kernels.
        batches = run["updates"] + run["skipped_updates"]
        return run["words"] / batches / run["update_seconds_median"]
    words = statistics.median(rate(json.loads(line)) for line in lines)
    print(f"{file.stem:12}{words:10.0f} word pieces/s{memory:8.0f} MiB in use")
PY
