"""Computes the logits of a sequence classifier with PyTorch/transformers, for the tests in transformers.rs.

python transformers_logits.py MODEL_DIR PAIRS.tsv OUT_DIR MAX_LENGTH

Adds a randomly initialised two-class head to the BERT in MODEL_DIR, saves the model to OUT_DIR with
transformers, and prints the logits of each pair in PAIRS.tsv as JSON.
"""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model_dir, pairs, out_dir, max_length = sys.argv[1:5]
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=2).eval()
torch.nn.init.normal_(model.classifier.weight, std=0.2)
torch.nn.init.normal_(model.classifier.bias, std=0.2)
model.save_pretrained(out_dir, safe_serialization=True)
tokenizer = AutoTokenizer.from_pretrained(model_dir)
rows = [line.split("\t") for line in pathlib.Path(pairs).read_text(encoding="utf-8").splitlines()]
inputs = tokenizer([row[0] for row in rows], [row[1] for row in rows], padding="longest",
                   truncation=True, max_length=int(max_length), return_tensors="pt")
with torch.no_grad():
    print(json.dumps(model(**inputs).logits.tolist()))
