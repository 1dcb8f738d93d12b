#!/usr/bin/env bash
# Training steps here and in PyTorch on a CPU, in turns in one run. Builds once, with the default features, and hands
# its arguments to `vs_torch.py`, which has the cases.
#
#   PYTHON=venv/bin/python fsdp-runtime/benches/vs_torch.sh [--rounds 3] [--steps 12] [CASE ..]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
if ! "$python" -c 'import torch, transformers' 2>/dev/null; then
  echo "no torch or no transformers in $python: pip install torch==2.11.0 numpy transformers, or set PYTHON to one that has it" >&2
  exit 1
fi
step=$(cargo bench --bench step --no-run --message-format=json |
  sed -n 's/.*"name":"step".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
cargo build --release --example gpt_pretrain --example llm_finetune
examples=$(dirname "$step")/../examples
STEP=$step GPT=$examples/gpt_pretrain LLM=$examples/llm_finetune exec "$python" fsdp-runtime/benches/vs_torch.py "$@"
