"""Training of a Llama with random weights in transformers: the peer of `examples/llm_finetune`.

    torchrun --nproc-per-node 1 torch_llama.py --dtype bf16 --hidden 2048 --layers 22 --heads 32 --kv-heads 4 \\
        --inner 5632 --vocabulary 32000 --rows 2 --length 2048
    python torch_llama.py --device cpu --hidden 576 --layers 30 --heads 9 --kv-heads 3 --inner 1536 \\
        --vocabulary 49152 --tied --rows 2 --length 512

On a GPU each decoder layer and the model are sharded with FSDP2 (`fully_shard`) on the only rank; on a CPU the
model is plain. Attention is `scaled_dot_product_attention`. The recipe is that of `gpu/llama.py`: all parameters
are trained with fused AdamW, a decay of 0.1 on matrices and a gradient norm of at most 1, on rows of random words.
Prints one JSON line for each step, and one with the result: all losses and seconds, and the most bytes that the
allocator held on the GPU, or that were resident.
Needs: pip install torch==2.11.0 numpy transformers
"""
import argparse
import json
import os
import resource
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--hidden", type=int, required=True, help="width of the residual stream")
parser.add_argument("--layers", type=int, required=True)
parser.add_argument("--heads", type=int, required=True, help="heads of queries")
parser.add_argument("--kv-heads", type=int, required=True, help="heads of keys and of values")
parser.add_argument("--inner", type=int, required=True, help="width within the feed-forward block")
parser.add_argument("--vocabulary", type=int, required=True)
parser.add_argument("--tied", action="store_true", help="the output weight is the embedding's")
parser.add_argument("--rows", type=int, default=2, help="rows of a step [2]")
parser.add_argument("--length", type=int, default=512, help="words of a row [512]")
parser.add_argument("--steps", type=int, default=12, help="steps, warm-up included [12]")
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="of gathered parameters, on a GPU [f32]")
parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
args = parser.parse_args()
on_gpu = args.device == "cuda"
if args.dtype == "bf16" and not on_gpu:
    parser.error("--dtype bf16 needs --device cuda")


def new_model(device: torch.device) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        intermediate_size=args.inner,
        vocab_size=args.vocabulary,
        max_position_embeddings=args.length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=args.tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    # transformers draws matrices with a standard deviation of 0.02, its `initializer_range`.
    with device:
        return LlamaForCausalLM(config)


def main() -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(args.device, local_rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(1)
    if on_gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        torch.set_num_threads(os.cpu_count() or 1)
    model = new_model(device)
    num_params = sum(param.numel() for param in model.parameters())
    if on_gpu:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if args.dtype == "bf16" else None)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, args.lr, weight_decay=0.1, fused=True)
    losses, seconds = [], []
    for step in range(args.steps):
        text = torch.randint(args.vocabulary, (args.rows, args.length), device=device)
        begin = time.perf_counter()
        # transformers shifts the labels, and computes the loss in f32.
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # As ours, which reads the loss of each step.
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
        print(json.dumps({"step": step + 1, "seconds": seconds[-1], "loss": losses[-1]}), flush=True)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_reserved() if on_gpu else resident
    result = {"num_params": num_params, "losses": losses, "step_seconds": seconds, "peak_bytes": peak}
    print(json.dumps(result), flush=True)
    if on_gpu:
        dist.destroy_process_group()


main()
