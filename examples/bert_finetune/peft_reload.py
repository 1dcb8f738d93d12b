"""Loads exported adapters with Hugging Face's PEFT, for the test in transformers.rs.

python peft_reload.py BASE_DIR ADAPTER_DIR PAIRS.tsv MAX_LENGTH

Prints as JSON the adapters' keys that PEFT misses or does not expect, and the word-piece ids and logits of
each pair in PAIRS.tsv.
"""

import json
import pathlib
import sys

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

base_dir, adapter_dir, pairs, max_length = sys.argv[1:5]
config = PeftConfig.from_pretrained(adapter_dir)
assert config.base_model_name_or_path == base_dir, config
base = AutoModelForSequenceClassification.from_pretrained(base_dir)
model = PeftModel.from_pretrained(base, adapter_dir)
# The names and values that PEFT would save are those of the file.
expected = get_peft_model_state_dict(model)
found = load_file(str(pathlib.Path(adapter_dir) / "adapter_model.safetensors"))
mismatched = [name for name in expected.keys() & found.keys()
              if not torch.equal(expected[name], found[name])]
tokenizer = AutoTokenizer.from_pretrained(adapter_dir)
rows = [line.split("\t") for line in pathlib.Path(pairs).read_text(encoding="utf-8").splitlines()]
inputs = tokenizer([row[0] for row in rows], [row[1] for row in rows], padding="longest",
                   truncation=True, max_length=int(max_length), return_tensors="pt")
with torch.no_grad():
    logits = model.eval()(**inputs).logits.tolist()
print(json.dumps({"missing": sorted(expected.keys() - found.keys()),
                  "unexpected": sorted(found.keys() - expected.keys()), "mismatched": mismatched,
                  "ids": inputs["input_ids"].tolist(), "logits": logits}))
