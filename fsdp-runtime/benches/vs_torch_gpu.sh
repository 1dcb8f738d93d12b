#!/usr/bin/env bash
# One training step of a BERT of the base shape on one GPU, in PyTorch (`fully_shard`, one rank over
# NCCL) and here (FULL_SHARD, one rank over NCCL), in turns in one run, in f32 and in bf16. Prints
# tokens per second, medians over all rounds, and the most memory that each process had on the GPU.
#
#   PYTHON=venv/bin/python fsdp-runtime/benches/vs_torch_gpu.sh
#
# ROUNDS (3) and STEPS (30) may be set. Nothing else may use the GPU.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
rounds=${ROUNDS:-3}
export STEPS=${STEPS:-30}
command -v nvidia-smi >/dev/null || { echo "no GPU: nvidia-smi was not found" >&2; exit 1; }
"$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null ||
  { echo "no torch with CUDA in $python: pip install torch, or set PYTHON to one that has it" >&2; exit 1; }
rows=32 length=128 hidden=768 layers=12 heads=12 inner=3072
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

cargo bench -q --bench step --features cuda --no-run

# Runs a command, and notes the most MiB that were in use on GPU 0 meanwhile.
watched() {
  local name=$1
  shift
  nvidia-smi --id=0 --query-gpu=memory.used --format=csv,noheader,nounits -lms 50 >"$results/smi" &
  local smi=$!
  "$@"
  kill "$smi"
  wait "$smi" 2>/dev/null || true
  sort -n "$results/smi" | tail -n 1 >>"$results/$name.memory"
}

ours() {
  cargo bench -q --bench step --features cuda -- --cuda 0 $2 --world 1 --rounds 1 --steps "$STEPS" \
    --batch $rows --length $length --hidden $hidden --layers $layers --heads $heads --inner $inner \
    --brief --only FULL_SHARD 2>/dev/null | head -n 1 >>"$results/$1.seconds"
}
theirs() {
  DEVICE=cuda DTYPE=$2 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 \
    "$python" torch_bert.py fsdp $rows $length $hidden $layers $heads $inner |
    sed -n 's/.* step \([0-9.]*\) s.*/\1/p' >>"$results/$1.seconds"
}

for ((round = 1; round <= rounds; round++)); do
  echo "round $round of $rounds" >&2
  watched ours-f32 ours ours-f32 ""
  watched torch-f32 theirs torch-f32 f32
  watched ours-bf16 ours ours-bf16 --bf16
  watched torch-bf16 theirs torch-bf16 bf16
done
nvidia-smi --id=0 --query-gpu=name,driver_version --format=csv,noheader
"$python" - "$results" $((rows * length)) <<'PY'
import pathlib, statistics, sys
folder, tokens = pathlib.Path(sys.argv[1]), int(sys.argv[2])
numbers = lambda name: [float(line) for line in (folder / name).read_text().split()]
for name in ("ours-f32", "torch-f32", "ours-bf16", "torch-bf16"):
    step = statistics.median(numbers(f"{name}.seconds"))
    memory = max(numbers(f"{name}.memory"))
    print(f"{name:12}{step:9.4f} s a step{tokens / step:12.0f} tokens/s{memory:8.0f} MiB in use")
PY
