"""Time of one step of PyTorch's fused AdamW on the CPU, as `optim.rs` prints it for ours.

python torch_adamw.py [millions of elements ..]      (needs torch 2.4 or later)
"""

import os
import statistics
import sys
import time

try:
    import torch
except ImportError:
    sys.exit("PyTorch is missing: pip install torch")

RUNS = 11
WARM_UP = 2


def adamw(elements: int) -> float:
    """The median time of a step, per element, in nanoseconds."""
    param = torch.nn.Parameter(torch.linspace(-0.5, 0.5, elements))
    param.grad = torch.linspace(-5e-3, 5e-3, elements)
    optimizer = torch.optim.AdamW([param], lr=1e-3, fused=True)
    times = []
    for _ in range(WARM_UP + RUNS):
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:]) * 1e9 / elements


def main() -> None:
    millions = [int(argument) for argument in sys.argv[1:]] or [22, 100]
    print("elements  threads  step   ns/element")
    for size in millions:
        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            torch.set_num_threads(threads)
            print(f"{size:>6} M  {threads:>7}  torch  {adamw(size * 1_000_000):>10.3f}", flush=True)


if __name__ == "__main__":
    main()
