#!/usr/bin/env bash
# Kills a training run that saves every 3 steps at random moments. Every restart must resume from a complete
# checkpoint, and the losses at the end must have the bits of those of a run that was not killed.
#
#   tests/kill.sh [KILLS] [BINARY]     5 kills of the debug build of `bert_finetune` by default
set -euo pipefail
cd "$(dirname "$0")/.."
kills=${1:-5}
binary=${2:-${CARGO_TARGET_DIR:-target}/debug/examples/bert_finetune}
[ -x "$binary" ] || { echo "no $binary; run: cargo build --example bert_finetune"; exit 2; }

work=$(mktemp -d)
process=
trap '[ -z "$process" ] || kill -9 "$process" 2>/dev/null || true; rm -rf "$work"' EXIT
run=("$binary" --steps 100000 --batch-size 2 --max-length 16 --seed 3 --json)
log=$work/log

fail() { echo "FAILED: $*"; tail -n 20 "$log"; exit 1; }
complete() { { find "$work/run" -path '*/step-????????/manifest.json' 2>/dev/null || true; } | sort; }
alive() { kill -0 "$process" 2>/dev/null; }

resumed=0
for ((kill = 1; kill <= kills; kill++)); do
  flags=(--save-dir "$work/run" --save-every 3 --keep-last 2)
  from=$(complete | tail -n 1)
  [ -z "$from" ] || flags=(--resume "$work/run" --save-every 3 --keep-last 2)
  "${run[@]}" "${flags[@]}" >/dev/null 2>"$log" &
  process=$!
  # The kill comes at a random moment after the run has resumed, or has saved for the first time.
  until { [ -n "$from" ] && grep -q 'resumed after step' "$log"; } \
    || { [ -z "$from" ] && [ -n "$(complete)" ]; }; do
    alive || fail "restart $kill was refused"
    sleep 0.02
  done
  [ -z "$from" ] || resumed=$((resumed + 1))
  sleep "$(awk -v seed="$RANDOM" 'BEGIN { srand(seed); print rand() * 1.5 }')"
  alive || fail "run $kill ended by itself"
  kill -9 "$process"
  wait "$process" 2>/dev/null || true
  process=
  [ -n "$(complete)" ] || fail "no complete checkpoint is left after kill $kill"
done

# Compares the last steps of the killed run with the same steps of a run that was not killed.
step=$(grep -o 'step-[0-9]*' <<<"$(complete | tail -n 1)" | tail -n 1 | sed 's/step-0*//')
last=$((step + 5))
"${run[@]}" --resume "$work/run" --stop-after "$last" >"$work/resumed" 2>"$log" || fail "the last restart"
grep -q "resumed after step $step\$" "$log" || fail "the last restart did not resume after step $step"
find "$work/run" -name '*.tmp-*' | grep -q . && fail "a torn save was not cleaned up"
"${run[@]}" --stop-after "$last" >"$work/whole" 2>"$log" || fail "the run that was not killed"
python3 - "$work/resumed" "$work/whole" <<'PYTHON'
import json, sys
tail, whole = (json.loads(open(path).read().splitlines()[-1])["losses"] for path in sys.argv[1:])
assert len(tail) == 5, len(tail)
assert whole[-5:] == tail, (whole[-5:], tail)
PYTHON
echo "$kills kills, $resumed resumed restarts, $last steps: the losses of a run that was not killed"
