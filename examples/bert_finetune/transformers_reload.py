"""Loads an exported classifier with PyTorch/transformers, for the tests in transformers.rs.

python transformers_reload.py MODEL_DIR PAIRS.tsv MAX_LENGTH

Prints as JSON the missing, unexpected and mismatched keys that transformers reports, and the word-piece
ids and logits of each pair in PAIRS.tsv.
"""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model_dir, pairs, max_length = sys.argv[1:4]
model, loading = AutoModelForSequenceClassification.from_pretrained(model_dir,
                                                                    output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(model_dir)
rows = [line.split("\t") for line in pathlib.Path(pairs).read_text(encoding="utf-8").splitlines()]
inputs = tokenizer([row[0] for row in rows], [row[1] for row in rows], padding="longest",
                   truncation=True, max_length=int(max_length), return_tensors="pt")
with torch.no_grad():
    logits = model.eval()(**inputs).logits.tolist()
keys = {kind: sorted(map(str, loading[f"{kind}_keys"]))
        for kind in ("missing", "unexpected", "mismatched")}
print(json.dumps({**keys, "ids": inputs["input_ids"].tolist(), "logits": logits}))
