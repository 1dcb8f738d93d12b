"""PyTorch's attention for `attention.rs`: reads `heads length width causal` lines, and answers each with the
seconds of one forward and one backward of `scaled_dot_product_attention` in f32."""
import sys
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(int(sys.argv[1]))
for line in sys.stdin:
    heads, length, width, causal = map(int, line.split())
    query, key, value = (torch.randn(1, heads, length, width, requires_grad=True) for _ in range(3))
    weights = torch.randn(1, heads, length, width)
    begin = time.perf_counter()
    output = F.scaled_dot_product_attention(query, key, value, is_causal=bool(causal))
    forward = time.perf_counter() - begin
    loss = (output * weights).sum()
    begin = time.perf_counter()
    loss.backward()
    print(forward, time.perf_counter() - begin, flush=True)
