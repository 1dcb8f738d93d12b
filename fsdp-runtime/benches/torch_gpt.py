"""GPT pretraining in PyTorch with `fully_shard`: the peer of `examples/gpt_pretrain`.

    torchrun --nproc-per-node 1 torch_gpt.py --arch 1.3B --bf16
    torchrun --nproc-per-node 1 torch_gpt.py --arch 6.7B --bf16 --cpu-offload --checkpoint-activations

The same decoder (GPT-2's, with the sizes of fairseq's GPT-3), the same recipe (AdamW with betas of 0.9
and 0.98, decay of 0.1, a gradient norm of at most 1) and as many word pieces an update, here of random
text. Prints one JSON line for each update, and one with the result: word pieces a second from the median
update, and the most bytes that the allocator held on the device.
"""
import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

# Layers, width, heads, vocabulary: those of examples/gpt_pretrain/arch.rs, where a test compares them.
ARCHS = {
    "tiny": (2, 128, 4, 512),
    "small": (12, 768, 12, 50_272),
    "1.3B": (24, 2048, 32, 50_272),
    "2.7B": (32, 2560, 32, 50_272),
    "6.7B": (32, 4096, 32, 50_272),
    "13B": (40, 5120, 40, 50_272),
}
INIT_STD = 0.02
WARM_UP = 2

parser = argparse.ArgumentParser()
parser.add_argument("--arch", choices=ARCHS, default="tiny")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--tokens-per-sample", type=int, default=2048)
parser.add_argument("--max-update", type=int, default=10)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--tf32", action="store_true", help="products of f32 in TF32, as CubeCL computes them")
parser.add_argument("--cpu-offload", action="store_true")
parser.add_argument("--checkpoint-activations", action="store_true")
parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
args = parser.parse_args()
LAYERS, WIDTH, HEADS, VOCABULARY = ARCHS[args.arch]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (
            part.view(rows, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(args.tokens_per_sample, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            if args.checkpoint_activations and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.norm(x) @ self.tokens.weight.T


def main():
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    on_gpu = args.device == "cuda"
    device = torch.device(args.device, local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = args.tf32
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    with torch.device("meta"):
        model = Gpt()
    half = torch.bfloat16 if args.bf16 else None
    options = {"offload_policy": CPUOffloadPolicy(on_gpu) if args.cpu_offload else OffloadPolicy()}
    if not on_gpu:
        options["mesh"] = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=half), **options)
    policy = MixedPrecisionPolicy(param_dtype=half, output_dtype=torch.float32)
    fully_shard(model, mp_policy=policy, **options)
    model.to_empty(device="cpu" if args.cpu_offload else device)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            local = param.to_local()
            if "norm" in name:
                local.fill_(1.0 if name.endswith("weight") else 0.0)
            elif name.endswith("bias"):
                local.zero_()
            else:
                local.normal_(std=INIT_STD)
    decayed = [param for name, param in model.named_parameters() if param.ndim > 1]
    others = [param for name, param in model.named_parameters() if param.ndim == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, args.lr, (0.9, 0.98), weight_decay=0.1, fused=True)
    shape = (args.batch_size, args.tokens_per_sample + 1)
    seconds = []
    for update in range(WARM_UP + args.max_update):
        text = torch.randint(VOCABULARY, shape, device=device)
        begin = time.perf_counter()
        logits = model(text[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # As ours, which reads the loss of each update.
        found = loss.item()
        seconds.append(time.perf_counter() - begin)
        if dist.get_rank() == 0:
            print(json.dumps({"update": update + 1, "seconds": seconds[-1], "loss": found}), flush=True)
    words = args.batch_size * args.tokens_per_sample * dist.get_world_size()
    step = statistics.median(seconds[WARM_UP:])
    peak = torch.cuda.max_memory_reserved() if on_gpu else 0
    if dist.get_rank() == 0:
        result = {"arch": args.arch, "words_per_second": words / step, "seconds": step, "loss": found}
        print(json.dumps(result | {"peak_bytes": peak}), flush=True)
    dist.destroy_process_group()


main()
