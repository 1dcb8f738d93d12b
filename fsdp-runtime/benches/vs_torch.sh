#!/usr/bin/env bash
# One training step of a BERT in PyTorch and here, in turns in one run: a single process on twice the
# batch, data-parallel (DDP) and fully sharded (FSDP2) on two ranks, and this crate's FULL_SHARD and
# NO_SHARD on two ranks. Prints seconds and the ratios ours / theirs, medians over all rounds.
#
#   PYTHON=venv/bin/python fsdp-runtime/benches/vs_torch.sh [FEATURES]
#
# FEATURES are handed to cargo. ROUNDS (3) and STEPS (12) may be set.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
rounds=${ROUNDS:-3}
export STEPS=${STEPS:-12}
if ! "$python" -c 'import torch' 2>/dev/null; then
  echo "no torch in $python: pip install torch==2.11.0 numpy, or set PYTHON to one that has it" >&2
  exit 1
fi
shape=(128 384 6 12 1536)

ours() {
  cargo bench -q --bench step ${features:+--features "$features"} -- \
    --world 2 --rounds 1 --steps "$STEPS" --brief --only "$1" 2>/dev/null | head -n 1
}
features=${1:-}

ranks() {
  local pids=() rank
  for rank in 0 1; do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 \
      "$python" torch_bert.py "$1" 4 "${shape[@]}" & pids+=($!)
  done
  for rank in "${pids[@]}"; do wait "$rank"; done
}
# The slower rank's step.
seconds() { sed -n 's/.* step \([0-9.]*\) s.*/\1/p' | sort -g | tail -n 1; }

results=$(mktemp)
trap 'rm -f "$results"' EXIT
cargo bench -q --bench step ${features:+--features "$features"} --no-run 2>/dev/null
for ((round = 1; round <= rounds; round++)); do
  echo "round $round of $rounds" >&2
  echo "single $("$python" torch_bert.py single 8 "${shape[@]}" 2>/dev/null | seconds)" >>"$results"
  echo "FULL_SHARD $(ours FULL_SHARD)" >>"$results"
  echo "ddp $(ranks ddp 2>/dev/null | seconds)" >>"$results"
  echo "NO_SHARD $(ours NO_SHARD)" >>"$results"
  echo "fsdp $(ranks fsdp 2>/dev/null | seconds)" >>"$results"
done
"$python" - "$results" <<'PY'
import collections, statistics, sys
times = collections.defaultdict(list)
for line in open(sys.argv[1]):
    name, seconds = line.split()
    times[name].append(float(seconds))
median = {name: statistics.median(values) for name, values in times.items()}
names = {"single": "PyTorch, one process, batch 8", "ddp": "PyTorch DDP, 2 x 4",
         "fsdp": "PyTorch FSDP2, 2 x 4"}
for name in ("FULL_SHARD", "NO_SHARD"):
    print(f"{name + ', 2 x 4':32}{median[name]:8.3f} s")
for name, title in names.items():
    print(f"{title:32}{median[name]:8.3f} s   FULL_SHARD {median['FULL_SHARD'] / median[name]:.2f} x"
          f"   NO_SHARD {median['NO_SHARD'] / median[name]:.2f} x")
PY
