"""PyTorch's attention for `attention.rs`: the seconds of one forward and one backward of
`scaled_dot_product_attention`, 12 heads of width 64.

python torch_attention.py THREADS                        reads `heads length width causal` lines, answers each; f32
DEVICE=cuda DTYPE=bf16 python torch_attention.py --batch B --lengths L,..
                                                         prints the medians of ROUNDS (9) as JSON, for each shape
"""
import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

HEADS, WIDTH, WARM_UP = 12, 64, 2
device = os.environ.get("DEVICE", "cpu")
dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[os.environ.get("DTYPE", "f32")]
torch.backends.cuda.matmul.allow_tf32 = os.environ.get("TF32", "0") == "1"


def seconds():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run(shape, causal):
    """The seconds of one forward and one backward."""
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    weights = torch.randn(shape, device=device, dtype=dtype)
    begin = seconds()
    output = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    forward = seconds() - begin
    loss = (output * weights).sum()
    begin = seconds()
    loss.backward()
    return forward, seconds() - begin


def answer_lines(threads):
    torch.set_num_threads(threads)
    for line in sys.stdin:
        heads, length, width, causal = map(int, line.split())
        print(*run((1, heads, length, width), bool(causal)), flush=True)


def measure(batch, lengths):
    for length in lengths:
        for causal in (False, True):
            rounds = WARM_UP + int(os.environ.get("ROUNDS", 9))
            times = [run((batch, HEADS, length, WIDTH), causal) for _ in range(rounds)][WARM_UP:]
            forward, backward = (statistics.median(column) for column in zip(*times))
            both = statistics.median(map(sum, times))
            print(json.dumps({"length": length, "causal": causal, "forward": forward, "backward": backward,
                              "both": both}), flush=True)


if sys.argv[1].isdigit():
    answer_lines(int(sys.argv[1]))
else:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--lengths", type=lambda text: [int(length) for length in text.split(",")], required=True)
    arguments = parser.parse_args()
    measure(arguments.batch, arguments.lengths)
