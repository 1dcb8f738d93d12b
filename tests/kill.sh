#!/usr/bin/env bash
# Kills a training run that saves every 3 steps at random moments. Every restart must resume from a complete
# checkpoint, and the losses at the end must have the bits of those of a run that was not killed. Then Ctrl-C
# must end a run with a checkpoint.
#
#   tests/kill.sh [KILLS] [BINARY]     5 kills of the debug build of `bert_finetune` by default; `gpt_pretrain`
#                                      and `llm_finetune` are killed in the same way. The latter trains adapters
#                                      with dropout, whose files at the end must be equal as well
set -euo pipefail
cd "$(dirname "$0")/.."
kills=${1:-5}
binary=${2:-${CARGO_TARGET_DIR:-target}/debug/examples/bert_finetune}
[ -x "$binary" ] || { echo "no $binary; run: cargo build --example $(basename "$binary")"; exit 2; }

work=$(mktemp -d)
process=
trap '[ -z "$process" ] || kill -9 "$process" 2>/dev/null || true; rm -rf "$work"' EXIT
log=$work/log

# What differs between the programs: the flags of a run, of its first start and of a restart, how it stops after
# a step, and what it says when it has resumed.
whole=()
case $(basename "$binary") in
  bert_finetune)
    run=("$binary" --steps 100000 --batch-size 2 --max-length 16 --seed 3 --json)
    save=(--save-every 3 --keep-last 2)
    first=(--save-dir "$work/run" "${save[@]}")
    again=(--resume "$work/run" "${save[@]}")
    load=(--resume "$work/run")
    stop_after() { echo --stop-after "$1"; }
    resumed_after() { echo "resumed after step $1"; }
    ;;
  gpt_pretrain)
    # The learning rates do not depend on --max-update. An epoch has 22 updates.
    awk 'BEGIN { for (at = 0; at < 400; at++) print "The whale number", at * at % 97, "dives", at * 7 % 31, "times." }' \
      >"$work/text"
    run=("$binary" --data "$work/text" --bpe-cache "$work/bpe" --batch-size 2 --tokens-per-sample 64 --dropout 0.1)
    run+=(--total-num-update 100000 --update-freq 1,2,1 --max-valid-steps 1 --seed 3 --json)
    save=(--save-interval-updates 3 --keep-interval-updates 2 --keep-last-epochs 1)
    first=(--save-dir "$work/run" "${save[@]}" --max-update 100000)
    again=("${first[@]}")
    load=(--save-dir "$work/run" --save-interval-updates 1)
    stop_after() { echo --max-update "$1"; }
    resumed_after() { echo "Loaded checkpoint .* @ $1 updates)"; }
    ;;
  llm_finetune)
    "$binary" --steps 1 --token-cache "$work/tokens" --save "$work/model" --quiet >/dev/null
    run=("$binary" --model "$work/model" --lora 4 --lora-dropout 0.1 --token-cache "$work/tokens" --eval-fraction 0.01)
    run+=(--steps 100000 --batch-size 1 --accumulate 2 --eval-every 40 --seed 3 --json)
    save=(--save-every 3 --keep-last 2)
    first=(--save-dir "$work/run" "${save[@]}")
    again=(--resume "$work/run" "${save[@]}")
    load=(--resume "$work/run" --save "$work/files-resumed")
    whole=(--save "$work/files-whole")
    stop_after() { echo --stop-after "$1"; }
    resumed_after() { echo "resumed after step $1"; }
    ;;
  *) echo "no flags for $binary"; exit 2 ;;
esac

fail() { echo "FAILED: $*"; tail -n 20 "$log"; exit 1; }
complete() {
  { find "$work/run" -path '*/step-????????/manifest.json' 2>/dev/null || true; } \
    | sed 's/.*step-0*\([0-9]*\).*/\1/' | sort -n
}
newest() { complete | tail -n 1; }
alive() { kill -0 "$process" 2>/dev/null; }
# Starts the run, and returns at a random moment after it has resumed, or has saved for the first time.
start() {
  local flags=("${first[@]}") from
  from=$(newest)
  [ -z "$from" ] || flags=("${again[@]}")
  # The new process opens the log some time after it was started. Until then the log must not be that of
  # the run before.
  : >"$log"
  "${run[@]}" "${flags[@]}" >/dev/null 2>"$log" &
  process=$!
  until { [ -n "$from" ] && grep -q "$(resumed_after '[0-9]*')" "$log"; } \
    || { [ -z "$from" ] && [ -n "$(newest)" ]; }; do
    alive || fail "a restart was refused"
    sleep 0.02
  done
  [ -z "$from" ] || resumed=$((resumed + 1))
  sleep "$(awk -v seed="$RANDOM" 'BEGIN { srand(seed); print rand() * 1.5 }')"
  alive || fail "a run ended by itself"
}

resumed=0
for ((kill = 1; kill <= kills; kill++)); do
  start
  kill -9 "$process"
  wait "$process" 2>/dev/null || true
  process=
  [ -n "$(newest)" ] || fail "no complete checkpoint is left after kill $kill"
done

start
kill -INT "$process"
code=0
wait "$process" || code=$?
process=
[ "$code" = 130 ] || fail "Ctrl-C ended the run with code $code"
grep -q "saving a checkpoint, then ending" "$log" || fail "Ctrl-C was not noticed"

# Compares the last steps of the killed run with the same steps of a run that was not killed.
step=$(newest)
last=$((step + 5))
read -ra stop <<<"$(stop_after "$last")"
"${run[@]}" "${load[@]}" "${stop[@]}" >"$work/resumed" 2>"$log" || fail "the last restart"
grep -q "$(resumed_after "$step")\$" "$log" || fail "the last restart did not resume after step $step"
# A torn save of the end of an epoch stays until the next one.
find "$work/run" -path '*/epochs/*' -prune -o -name '*.tmp-*' -print | grep -q . && fail "a torn save was not cleaned up"
"${run[@]}" "${whole[@]}" "${stop[@]}" >"$work/whole" 2>"$log" || fail "the run that was not killed"
if [ -d "$work/files-whole" ]; then diff -r "$work/files-resumed" "$work/files-whole" || fail "other files were saved"; fi
python3 - "$work/resumed" "$work/whole" <<'PYTHON'
import json, sys
tail, whole = (json.loads(open(path).read().splitlines()[-1])["losses"] for path in sys.argv[1:])
assert len(tail) == 5, len(tail)
assert whole[-5:] == tail, (whole[-5:], tail)
PYTHON
echo "$kills kills, $resumed resumed restarts, $last steps: the losses of a run that was not killed"
