"""Time of one step of PyTorch's fused AdamW on the CPU, as `optim.rs` prints it for ours.

python torch_adamw.py      (needs torch 2.4 or later)
"""

import os
import statistics
import sys
import time

try:
    import torch
except ImportError:
    sys.exit("PyTorch is missing: pip install torch")

# Tensors, and elements of each, as in `optim.rs`.
CASES = [(150, 384 * 384), (1, 100_000_000)]
RUNS = 11
WARM_UP = 2


def adamw(tensors: int, elements: int) -> float:
    """The median time of a step, per element, in nanoseconds."""
    params = [torch.nn.Parameter(torch.linspace(-0.5, 0.5, elements)) for _ in range(tensors)]
    for param in params:
        param.grad = torch.linspace(-5e-3, 5e-3, elements)
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    times = []
    for _ in range(WARM_UP + RUNS):
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:]) * 1e9 / (tensors * elements)


def main() -> None:
    print("tensors      elements  threads  step   ns/element")
    for tensors, elements in CASES:
        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            torch.set_num_threads(threads)
            nanoseconds = adamw(tensors, elements)
            print(f"{tensors:>7}  {elements:>12}  {threads:>7}  torch  {nanoseconds:>10.3f}", flush=True)


if __name__ == "__main__":
    main()
