"""Saves a small random GPT-2 with a tokenizer of its own, and prints its ids, logits and greedy text as JSON.

    python transformers_gpt2.py TEXT_FILE FOLDER PROMPT
"""

import json
import sys

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

text_file, folder, prompt = sys.argv[1:]
text = open(text_file, encoding="utf-8", newline="").read()
trainer = ByteLevelBPETokenizer()
trainer.train([text_file], vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
trainer.save_model(folder)
tokenizer = GPT2Tokenizer(f"{folder}/vocab.json", f"{folder}/merges.txt")
torch.manual_seed(5)
config = GPT2Config(
    vocab_size=len(tokenizer), n_positions=64, n_embd=48, n_layer=3, n_head=4,
    # Larger than the default, so that attention and GELU leave their linear range.
    initializer_range=0.3, bos_token_id=0, eos_token_id=0,
)
model = GPT2LMHeadModel(config).eval()
for name, parameter in model.named_parameters():
    if name.endswith("bias") or "ln_" in name:
        torch.nn.init.normal_(parameter, 0.5 if name.endswith("weight") else 0.0, 0.3)
model.save_pretrained(folder)

ids = tokenizer(text)["input_ids"]
input = torch.tensor([ids[:64], ids[64:128]])
start = torch.tensor([tokenizer(prompt)["input_ids"]])
with torch.no_grad():
    logits = model(input).logits
    greedy = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=30,
                            eos_token_id=None, pad_token_id=0)
print(json.dumps({
    "ids": ids,
    "logits": logits.flatten().tolist(),
    "greedy": greedy[0, start.shape[1]:].tolist(),
}))
