"""Loads exported adapters with Hugging Face's PEFT, for the test in transformers.rs.

python peft_reload.py BASE_DIR ADAPTER_DIR PAIRS.tsv MAX_LENGTH

Prints as JSON the adapters' keys that PEFT misses or does not expect, and the word-piece ids and logits of
each pair in PAIRS.tsv.
"""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "common"))
import peft_adapters  # noqa: E402 (its folder is known here)

base_dir, adapter_dir, pairs, max_length = sys.argv[1:5]
base = AutoModelForSequenceClassification.from_pretrained(base_dir)
model, keys = peft_adapters.load(base, base_dir, adapter_dir)
tokenizer = AutoTokenizer.from_pretrained(adapter_dir)
rows = [line.split("\t") for line in pathlib.Path(pairs).read_text(encoding="utf-8").splitlines()]
inputs = tokenizer([row[0] for row in rows], [row[1] for row in rows], padding="longest",
                   truncation=True, max_length=int(max_length), return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits.tolist()
print(json.dumps({**keys, "ids": inputs["input_ids"].tolist(), "logits": logits}))
