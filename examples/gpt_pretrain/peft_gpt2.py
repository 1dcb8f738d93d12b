"""Loads exported adapters of a GPT-2 with Hugging Face's PEFT, for the test in transformers.rs.

    python peft_gpt2.py BASE_DIR ADAPTER_DIR TEXT_FILE CHANGED_DIR

Prints as JSON the adapters' keys that PEFT misses or does not expect, and the logits of two samples of the text.
Then gives all factors random values, as training in PEFT would, saves the adapters in CHANGED_DIR, and prints
their logits too.
"""

import json
import pathlib
import sys

import torch
from transformers import GPT2LMHeadModel, GPT2Tokenizer

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "common"))
import peft_adapters  # noqa: E402 (its folder is known here)

base_dir, adapter_dir, text_file, changed_dir = sys.argv[1:]
tokenizer = GPT2Tokenizer(f"{adapter_dir}/vocab.json", f"{adapter_dir}/merges.txt")
ids = tokenizer(open(text_file, encoding="utf-8", newline="").read())["input_ids"]
input = torch.tensor([ids[:64], ids[64:128]])
base = GPT2LMHeadModel.from_pretrained(base_dir)
model, keys = peft_adapters.load(base, base_dir, adapter_dir)


def logits():
    with torch.no_grad():
        return model(input).logits.flatten().tolist()


exported = logits()
torch.manual_seed(6)
for name, parameter in model.named_parameters():
    if "lora_" in name:
        torch.nn.init.normal_(parameter, 0.0, 0.1)
model.save_pretrained(changed_dir)
print(json.dumps({**keys, "logits": exported, "changed": logits()}))
