"""A training step of GPT-2 (124 M) in PyTorch, in full or with PEFT's LoRA: the peer of `lora.rs`.

    torch_lora.py --way full
    torch_lora.py --way lora --rank 8

Prints the seconds of each counted step, and the peak resident memory in MB.
"""
import argparse
import resource
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

WARM_UP = 2

parser = argparse.ArgumentParser()
parser.add_argument("--way", choices=("full", "lora"), required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--rank", type=int, default=8)
args = parser.parse_args()

torch.manual_seed(1)
config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
model = GPT2LMHeadModel(config)
if args.way == "lora":
    from peft import LoraConfig, get_peft_model

    layers = ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]
    model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=layers, fan_in_fan_out=True))
model.train()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
words = [at * 7919 % 50_021 for at in range(args.length + 1)]
ids, targets = torch.tensor([words[:-1]]), torch.tensor(words[1:])
seconds = []
for step in range(args.steps):
    start = time.perf_counter()
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step >= WARM_UP:
        seconds.append(time.perf_counter() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
print("measured", *seconds, peak)
